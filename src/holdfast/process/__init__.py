"""The threads of the process, its terminal, and its end."""
