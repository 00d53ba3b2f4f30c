#!/bin/sh
# Inside the build root of the RDMA guest image. Argument: the release of the guests' kernel.
# Builds the unmodified vmw_pvrdma of Debian's kernel source against the headers of that release, and our programs.
set -e
release=$1
cd /build
source=$(ls /usr/src/linux-source-*.tar.xz)
name=${source##*/}; name=${name%.tar.xz}
tar xJf "$source" --wildcards "$name/drivers/infiniband/hw/vmw_pvrdma"
cd "$name/drivers/infiniband/hw/vmw_pvrdma"
make -C "/usr/lib/modules/$release/build" M="$PWD" CONFIG_INFINIBAND_VMWARE_PVRDMA=m modules
strip --strip-debug vmw_pvrdma.ko
cp vmw_pvrdma.ko /build/out/
cd /build/programs
mpi=/usr/lib/x86_64-linux-gnu/openmpi
for p in rdma-loop rdma-verify rdma-counter rdma-exact; do
  gcc -O2 -Wall -Wextra -Werror -o /build/out/$p $p.c -libverbs
done
for p in mpi-check mpi-steady; do
  gcc -O2 -Wall -Wextra -Werror -I$mpi/include -L$mpi/lib -o /build/out/$p $p.c -lmpi
done
