"""The DTensor, and what both rules and dispatch need to know about one."""
