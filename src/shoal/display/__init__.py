"""What a person sees of results in a terminal or a notebook: numbers in few digits, tables, small pictures."""
