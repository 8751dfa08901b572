"""``python -m glm4v_patched.integrations ms-swift``: print the file for its --external_plugins."""

import sys
from pathlib import Path

if __name__ == "__main__":
    if sys.argv[1:] != ["ms-swift"]:
        sys.exit("usage: python -m glm4v_patched.integrations ms-swift")
    print(Path(__file__).with_name("ms_swift_plugin.py"))
