"""What can be set, where values come from, and which of them holds.

`catalog` knows every option of what is installed; `files` and `command_line` read what was given; `resolution` decides.
"""
