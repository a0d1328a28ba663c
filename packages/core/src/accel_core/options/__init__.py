"""Options: how each is declared, where its value comes from, and what is made of it.

option_fields, conversion      which options a constructor has, and values of their types
option_sources, resolution     what was given outside of the code, and who is heard first handlers,
loader_options, project    the options that belong to no component component_options
the options of components, by the name that chooses them
"""
