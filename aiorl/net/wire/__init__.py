"""Messages and their encoding in frames, without rules about when they are sent."""
