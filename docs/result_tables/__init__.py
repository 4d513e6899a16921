"""What the tables of the results pages show."""
