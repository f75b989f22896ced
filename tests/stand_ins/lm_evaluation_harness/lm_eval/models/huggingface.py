from types import SimpleNamespace


class HFLM:
    def __init__(self, **arguments):
        self.arguments = arguments
        self.model = SimpleNamespace(config=SimpleNamespace())
