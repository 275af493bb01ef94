"""What a script touches: the stores of Gluon and of PyTorch, and what they have in common."""
