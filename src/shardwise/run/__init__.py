"""Starting ranks: as threads, as processes, and checking an installation."""
