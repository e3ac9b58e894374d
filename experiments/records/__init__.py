"""Records of a run about itself: flags, pictures and texts for TensorBoard, a profile, versions."""
