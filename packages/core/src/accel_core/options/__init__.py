"""Options: how each is declared, where its value comes from, and what is made of it."""
