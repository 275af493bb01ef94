"""What the launcher decides: events and a time in, verdicts out. No input or output here."""
