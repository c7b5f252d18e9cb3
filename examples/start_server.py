"""Start a server that speaks OpenAI's API; Ctrl-C stops it.

python examples/start_server.py [MODEL] [--port 8000 ...]     the same as `vlfit serve`: see --help
"""

import sys

from vlfit.cli.main import main

if __name__ == "__main__":
    sys.argv = ["vlfit", "serve", *sys.argv[1:]]
    main()
