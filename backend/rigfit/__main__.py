# SPDX-License-Identifier: Apache-2.0
"""`python -m rigfit`: the command line, also where no `rigfit` program is on the PATH."""

from rigfit.cli import main

if __name__ == "__main__":
    main()
