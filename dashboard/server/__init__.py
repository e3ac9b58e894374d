"""How the plugin answers a request: query, rows from TensorBoard, the picture made of them, the answer's format."""
