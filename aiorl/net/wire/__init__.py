"""What messages are and how they lie in frames: nothing of when they may be said."""
