class HFLM:
    def __init__(self, **arguments):
        self.arguments = arguments
