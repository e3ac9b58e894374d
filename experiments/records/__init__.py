"""What a run records about itself: flags, pictures and texts for TensorBoard, a profile, versions."""
