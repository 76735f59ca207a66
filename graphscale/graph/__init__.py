"""Walking, building and naming graphs."""
