"""`import tapeless` and `tapeless --help` leave torch out of sys.modules."""

import subprocess
import sys

from claim import Claims

COMMAND = "from tapeless.cli.main import main\ntry: main({})\nexcept SystemExit: pass"
SCRIPTS = {
    "import tapeless": "import tapeless",
    "tapeless --help": COMMAND.format(["--help"]),
    "tapeless gradcheck --help": COMMAND.format(["gradcheck", "--help"]),
}

claims = Claims("lazy_import")
for what, script in SCRIPTS.items():
    probe = f"{script}\nimport sys\nprint('torch' in sys.modules)"
    seen = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout.split()[-1]
    claims.check(f"{what} leaves torch out", bound="False", measured=seen, ok=seen == "False")
claims.finish()
