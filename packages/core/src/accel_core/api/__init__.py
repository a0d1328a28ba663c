"""Names that a plugin may import, by what they are for. Version promises are about these names.

    component     what components of every kind may use
    strategy      one way to distribute
    layouts       how its state lies on the ranks
    checkpoint    one format in which a run is saved and loaded
    loader        one way to read data
    precision     one way to choose dtypes
    tracker       one service that records
    diagnostics   one way to look into a loop
    launcher      starting processes, and the options of whatever is installed

Names that scripts use too, such as `Strategy`, are in `accel_core`. Other modules may change.
"""
