"""Keeps a training program running: starts it again when it dies, and knows when it hangs."""
