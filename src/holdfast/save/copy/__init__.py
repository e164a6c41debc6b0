"""Host memory: the image of a state, what is copied into it and when."""
