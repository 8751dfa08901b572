"""What unittest has from Python 3.11 on."""


class EntersContexts:
    @classmethod
    def enter(cls, context):
        """Enter a context that the class's last test ends."""
        value = context.__enter__()
        cls.addClassCleanup(context.__exit__, None, None, None)
        return value
