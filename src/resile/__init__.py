"""resile: elastic, fault-tolerant distributed training on Kubernetes and on bare machines.

Importing this package costs nothing: it pulls in neither torch nor a web server nor an event loop. Each
sub-package is one layer of the design and imports only the layers below it; `lint-imports` checks that.
"""

__version__ = "0.1.0"
