"""Host memory: the image of a state, and the copies into it."""
