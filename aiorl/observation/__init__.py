"""From what an environment shows to what a policy sees: preprocessors and running filters."""
