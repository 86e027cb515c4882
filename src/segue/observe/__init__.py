"""What was decided, what it cost: decisions, records and the tables made of them."""
