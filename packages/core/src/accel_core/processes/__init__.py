"""The processes of a run: who they are, how they meet, talk and end; `watch` looks after them."""
