"""``python -m glm4v_patched.integrations ms-swift`` prints the file for its --external_plugins."""

import sys
from pathlib import Path

PLUGINS = {"ms-swift": "ms_swift_plugin.py"}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PLUGINS:
        sys.exit(f"usage: python -m glm4v_patched.integrations ({' | '.join(PLUGINS)})")
    print(Path(__file__).with_name(PLUGINS[sys.argv[1]]))
