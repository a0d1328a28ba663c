"""The options that can be set, the sources of their values, and the precedence of these.

`catalog` knows every option of what is installed; `files` and `command_line` read what was given;
`resolution` decides.
"""
