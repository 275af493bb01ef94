"""How the launcher and its agents talk."""
