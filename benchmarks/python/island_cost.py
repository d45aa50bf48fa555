"""What the ranks of an island pay for being one learner: python benchmarks/python/island_cost.py [OPTIONS]

It is `diloco bench islands`; --help names the options.
"""

import sys

from diloco.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "islands"]
    main()
