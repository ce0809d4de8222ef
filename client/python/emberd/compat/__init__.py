"""Interfaces of other systems: scripts for them run on emberd with other imports."""
