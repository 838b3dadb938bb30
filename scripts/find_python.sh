# Sourced: `find_python TEST NAME...` prints the first of these interpreters for which the expression TEST is true.
find_python() {
  local test=$1 candidate
  shift
  for candidate in "$@"; do
    if "$candidate" -c "import sys; sys.exit(not ($test))" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
}
