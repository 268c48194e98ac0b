"""`python -m tapeless` is `tapeless`."""

import sys

from tapeless.cli.main import main

sys.exit(main())
