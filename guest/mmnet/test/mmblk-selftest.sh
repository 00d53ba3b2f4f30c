#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
S=${S:-self}; C=/sys/kernel/config/mmblk; mount -t configfs none /sys/kernel/config; cd /lab
trouble() { dmesg | grep -A25 -e 'BUG' -e Oops -e WARN -e 'Call Trace' -e 'blocked for' | head -60; }
insmod neigh_loop.ko && insmod mmblk.ko || { dmesg | tail -n 20; exit 1; }
serve() { e=$C/exports/$1; mkdir $e; echo $2 > $e/path; echo $S > $e/clients; echo 1 > $e/enable || dmesg | tail -n 5; cat $e/status; }
attach() { d=$C/devices/$1; mkdir $d; echo $S > $d/peer; echo $1 > $d/export; [ -n "$2" ] && echo $2 > $d/wait_ms; echo 1 > $d/enable
i=0; until [ -n "$(cat $d/disk)" ]; do i=$((i+1)); [ $i -gt 20 ] && { cat $d/state; dmesg | tail -n 30; exit 2; }; sleep 1; done
b=/dev/$(cat $d/disk); q=/sys/block/${b##*/}; echo "ATTACHED $1 $b" $(cat $d/state) $(cat $q/queue/stable_writes $q/queue/max_segments $q/queue/max_sectors_kb $q/queue/fua $q/queue/discard_max_bytes | tr '\n' ' ') ; }
v() { fio --name=v --filename=$b --rw=randwrite --bsrange=4k-128k --size=8M --io_size=8M --verify=crc32c --verify_fatal=1 --direct=1 --ioengine=libaio --iodepth=8 --randseed=7 --fsync=64 $* > /tmp/fio 2>&1; echo "FIO $? $*"; grep -e "err=" -e "  write:" -e "  read:" -e bad -e verify /tmp/fio | cut -c1-110; }
fs() { mke2fs -q -F $b && mount -t ext4 $b /mnt && dd if=/dev/urandom of=/mnt/x bs=1M count=4 2>/dev/null && sha256sum /mnt/x > /tmp/s && umount /mnt && mount -t ext4 $b /mnt && sha256sum -c /tmp/s; umount /mnt; }
echo "### bdev"; serve v0 /dev/vdb; attach v0; v; fs
blkdiscard -f -z -o 24M -l 8M $b; echo zero $? $(dd if=$b bs=1M skip=24 count=8 2>/dev/null | tr -d "\000" | wc -c); blkdiscard -f -o 32M -l 8M $b; echo discard $?
echo $(cat $C/devices/v0/counters); echo $(cat $C/exports/v0/counters); trouble
echo "### ring small"; echo 5 > /sys/module/neigh_loop/parameters/most; v --size=2M --io_size=2M; echo 512 > /sys/module/neigh_loop/parameters/most
echo "### unreachable"; echo 1 > /sys/module/neigh_loop/parameters/unreachable; v --size=2M --io_size=2M; echo 0 > /sys/module/neigh_loop/parameters/unreachable; echo $(cat $C/devices/v0/counters); trouble
echo "### link dies while it is written, 6 times"
v --size=8M --io_size=8M --rate=1m > /tmp/bg & p=$!
for i in 1 2 3 4 5 6; do sleep 0.5; echo 200 > /sys/module/neigh_loop/parameters/kill; cat $C/devices/v0/state; done; wait $p; cat /tmp/bg; echo $(cat $C/devices/v0/counters); trouble
echo "### export away and back"
v --size=4M --io_size=4M --rate=1m > /tmp/bg & p=$!; sleep 2; echo 0 > $C/exports/v0/enable; sleep 1; cat $C/devices/v0/state; echo 1 > $C/exports/v0/enable; wait $p; cat /tmp/bg; cat $C/devices/v0/state; trouble
echo "### wait 0: errors"
echo 0 > $C/devices/v0/wait_ms; echo 0 > $C/exports/v0/enable; sleep 1; cat $C/devices/v0/state; dd if=/dev/zero of=$b bs=64k count=1 oflag=direct 2>&1 | head -2; echo 1 > $C/exports/v0/enable; sleep 1.5; cat $C/devices/v0/state; dd if=/dev/zero of=$b bs=64k count=1 oflag=direct 2>&1 | head -1
echo "### file"; truncate -s 32M /tmp/f; serve f0 /tmp/f; attach f0; v --size=8M --io_size=8M; echo $(cat $C/exports/f0/counters)
echo "### readonly"; e=$C/exports/ro; mkdir $e; echo /dev/ram0 > $e/path; echo $S > $e/clients; echo 1 > $e/readonly; echo 1 > $e/enable; attach ro; dd if=/dev/zero of=$b bs=4k count=1 oflag=direct 2>&1 | tail -1; dd if=$b of=/dev/null bs=1M count=4 2>&1 | tail -1
echo "### not for us"; mkdir $C/exports/no; echo /dev/ram1 > $C/exports/no/path; echo other > $C/exports/no/clients; echo 1 > $C/exports/no/enable; d=$C/devices/no; mkdir $d; echo $S > $d/peer; echo no > $d/export; echo 1 > $d/enable; sleep 1; cat $d/state; dmesg | tail -n 2
echo "### apart"; for d in $C/devices/* $C/exports/*; do rmdir $d || echo $d; done; rmmod mmblk && rmmod neigh_loop; echo rmmod $?
trouble; dmesg | tail -n 12
