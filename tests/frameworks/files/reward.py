from swift.rewards import ORM, orms


class Right(ORM):
    def __call__(self, completions, solution, **kwargs):
        return [
            float(text.strip() == right) for text, right in zip(completions, solution, strict=True)
        ]


orms["right"] = Right
