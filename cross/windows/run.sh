#!/bin/bash
# The runner of Windows programs: Debian's wine64 has no command of its own in the path.
set -euo pipefail
export WINEPREFIX=$K3_WINE_DIR/prefix WINEDEBUG=-all WINEPATH=$K3_WINE_DIR
exec /usr/lib/wine/wine64 "$@"
