"""Files in folders that others can write to, or have made: opened and replaced without surprises."""
