"""``python -m glm4v_patched`` is ``glm4v-patched``."""

import sys

from .cli import main

sys.exit(main())
