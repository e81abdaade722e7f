"""Where state lives, and how it moves."""
