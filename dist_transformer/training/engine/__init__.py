"""DeepSpeed behind one class, the learning rates, Adam."""
