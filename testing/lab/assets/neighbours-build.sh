#!/bin/sh
# Inside the build root of the modules for neighbours. Argument: the release of the guests' kernel.
# Builds guest/mmnet and its test modules; where a kernel's source is there, checks them with sparse and with that kernel's checkpatch.
set -e
release=$1
kdir=/usr/lib/modules/$release/build
# Debian's headers have the kernel's type information, and the program that would copy it isn't there.
module() { make -C $1 KDIR=$kdir CONFIG_DEBUG_INFO_BTF_MODULES= $2 modules; }
cd /build/guest/mmnet
source=$(ls /usr/src/linux-source-*.tar.xz 2>/dev/null || true)
if [ -n "$source" ]; then
  checks=/build/out/sparse.txt
  { module . "C=2 CF=-Wsparse-error" && module test "C=2 CF=-Wsparse-error"; } > /tmp/build.log 2>&1 || failed=1
  grep -E '(warning|error):' /tmp/build.log > $checks || true
  # A compiler's error is no finding of sparse's.
  [ -z "$failed" ] || [ -s $checks ] || { cat /tmp/build.log >&2; exit 1; }
  n=$(grep -c '^ *CHECK ' /tmp/build.log) || { { echo "sparse looked at no file:"; cat /tmp/build.log; } >&2; exit 1; }
  echo "checked $n files with sparse $(sparse --version)" >> $checks

  name=${source##*/}; name=${name%.tar.xz}
  tar xJf "$source" -C /tmp "$name/scripts/checkpatch.pl" "$name/scripts/spelling.txt" "$name/scripts/const_structs.checkpatch"
  checks=/build/out/checkpatch.txt
  files=$(ls *.[ch] test/*.[ch] | grep -v '\.mod\.c$')
  # Lines are as long as in the rest of the project. Left out is what a module outside the kernel must do, ask for the kernel's version (the first
  # three types), and what macros that make names from their argument can't avoid.
  for f in $files; do
    perl /tmp/$name/scripts/checkpatch.pl --no-tree --terse --no-summary --max-line-length=140 \
      --ignore=FILE_PATH_CHANGES,LINUX_VERSION_CODE,CONSTANT_COMPARISON,MACRO_ARG_REUSE,MACRO_ARG_PRECEDENCE -f $f >> $checks || true
  done
  echo "checked $(echo $files | wc -w) files with checkpatch of $name" >> $checks
fi
module .
module test
# The test double stands in for cw_neigh, whose symbols have other versions: without versions of its own it may.
objcopy --remove-section=__kcrctab_gpl test/neigh_loop.ko
for m in *.ko test/*.ko; do strip --strip-debug $m; cp $m /build/out/; done
