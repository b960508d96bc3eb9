"""Views of a run: terminal, metrics, TensorBoard, report."""
