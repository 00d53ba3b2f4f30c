#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
# mmblk against itself, in one kernel: neigh_loop.ko in place of cw_neigh. Prints TAP; ends with 0 only when all checks hold. Needs root,
# fio, configfs, brd (with /dev/ram0 and ram1 of 16 MiB or more), mmblk.ko and neigh_loop.ko in the present folder, and a disk $DISK of 48 MiB or
# more (/dev/vdb) whose contents it destroys.
DISK=${DISK:-/dev/vdb}
C=/sys/kernel/config/mmblk
P=/sys/module/neigh_loop/parameters
n=0; failed=0
check() { # name, command...
	name=$1; shift; n=$((n+1))
	if "$@" > /tmp/check 2>&1; then echo "ok $n $name"; else failed=$((failed+1)); echo "not ok $n $name"; sed 's/^/# /' /tmp/check | tail -n 12; fi
}
is() { [ "$(cat $1)" = "$2" ] || { echo "$1 is $(cat $1), not $2"; return 1; }; }
becomes() { i=0; until [ "$(cat $1)" = "$2" ]; do i=$((i+1)); [ $i -gt 150 ] && { is $1 $2; return 1; }; sleep 0.1; done; }
count() { sed -n "s/^$2 //p" $C/$1/counters; }
serve() { mkdir $C/exports/$1 && echo $2 > $C/exports/$1/path && echo ${3:-self} > $C/exports/$1/clients && echo ${4:-0} > $C/exports/$1/readonly && echo 1 > $C/exports/$1/enable; }
attach() { mkdir $C/devices/$1 && echo self > $C/devices/$1/peer && echo $1 > $C/devices/$1/export && echo 1 > $C/devices/$1/enable && becomes $C/devices/$1/state live
	i=0; until [ -n "$(cat $C/devices/$1/disk)" ]; do i=$((i+1)); [ $i -gt 150 ] && return 1; sleep 0.1; done; }
disk() { echo /dev/$(cat $C/devices/$1/disk); }
verify() { d=$(disk $1); shift; fio --name=v --filename=$d --rw=randwrite --bsrange=4k-128k --size=8M --verify=crc32c --verify_fatal=1 --direct=1 \
	--ioengine=libaio --iodepth=8 --fsync=64 "$@"; }
write_one() { dd if=/dev/zero of=$(disk $1) bs=64k count=1 oflag=direct; }
fs() { d=$(disk $1); mke2fs -q -F $d && mount $d /mnt && head -c 4M /dev/urandom > /mnt/x && s=$(sha256sum < /mnt/x) && umount /mnt && mount $d /mnt &&
	[ "$(sha256sum < /mnt/x)" = "$s" ]; r=$?; umount /mnt; return $r; }
zeroes() { d=$(disk $1); blkdiscard -f -z -o 24M -l 8M $d && [ $(dd if=$d bs=1M skip=24 count=8 2>/dev/null | tr -d '\000' | wc -c) = 0 ] && blkdiscard -f -o 32M -l 8M $d; }
by_reference() { w=$(count devices/$1 written_bytes); r=$(count devices/$1 read_bytes)
	[ $w -gt 0 ] && [ $(count devices/$1 by_reference_bytes) = $w ] && [ $(count devices/$1 copied_bytes) = $r ] && [ $(count exports/$1 copied_bytes) = 0 ] && return
	cat $C/devices/$1/counters $C/exports/$1/counters; return 1; }
copied() { before=$(($(count devices/$1 written_bytes) - $(count devices/$1 by_reference_bytes))); verify $1 --size=2M || return 1
	[ $(($(count devices/$1 written_bytes) - $(count devices/$1 by_reference_bytes))) -gt $before ]; }
dies() { verify $1 --rate=1m > /tmp/job 2>&1 & job=$!; l=$(count devices/$1 lost)
	for i in 1 2 3 4 5 6; do sleep 0.5; echo 200 > $P/kill; becomes $C/devices/$1/state live || return 1; done
	wait $job || { cat /tmp/job; return 1; }; [ $(count devices/$1 lost) = $((l+6)) ]; }
away() { verify $1 --size=4M --rate=1m > /tmp/job 2>&1 & job=$!; sleep 2; echo 0 > $C/exports/$1/enable; becomes $C/devices/$1/state waiting || return 1
	echo 1 > $C/exports/$1/enable; wait $job || { cat /tmp/job; return 1; }; is $C/devices/$1/state live; }
no_wait() { echo 0 > $C/devices/$1/wait_ms; echo 0 > $C/exports/$1/enable; becomes $C/devices/$1/state failed && ! write_one $1 || return 1
	echo 1 > $C/exports/$1/enable; becomes $C/devices/$1/state live && write_one $1; }
read_only() { serve ro /dev/ram0 self 1 && attach ro && ! write_one ro && dd if=$(disk ro) of=/dev/null bs=1M count=4; }
denied() { serve no /dev/ram1 other || return 1; attach no; is $C/devices/no/state seeking; }
file() { truncate -s 32M /tmp/f && serve f /tmp/f && attach f && verify f; }
# A write to a file holds off a freeze of its file system once: twice would be for ever, if the freeze began in between. Then that system is frozen
# and thawed again and again while writes are under way; each must come back.
frozen() { mke2fs -q -F /dev/ram1 && mkdir -p /tmp/m && mount /dev/ram1 /tmp/m && truncate -s 16M /tmp/m/f && serve z /tmp/m/f && attach z || return 1
	d=$(disk z); echo ext4_file_write_iter > $P/probe && dd if=/dev/zero of=$d bs=64k count=16 oflag=direct; r=$?; echo none > $P/probe
	[ $r = 0 ] && is $P/holds_least 1 && is $P/holds_most 1 || return 1
	: > /tmp/writes
	while [ -e /tmp/writes ]; do fio --name=w --filename=$d --rw=randwrite --bs=4k --size=8M --direct=1 --ioengine=libaio --iodepth=16; done > /tmp/job 2>&1 & job=$!
	k=0; while [ $k -lt 20 ]; do k=$((k+1)); within_a_minute fsfreeze -f /tmp/m && within_a_minute fsfreeze -u /tmp/m || { echo "freeze $k hangs"; r=1; break; }; done
	rm /tmp/writes; [ $r = 0 ] || return 1
	wait $job && rmdir $C/devices/z $C/exports/z && umount /tmp/m; }
within_a_minute() { "$@" & p=$!; t=0; while kill -0 $p 2>/dev/null; do t=$((t+1)); [ $t -gt 600 ] && return 1; [ $t -lt 20 ] || sleep 0.1; done; wait $p; }
detached() { truncate -s 8M /tmp/g && serve g /tmp/g && attach g && echo 2 > $P/refuse && rmdir $C/devices/g; r=$?; echo 0 > $P/refuse; rmdir $C/exports/g || return 1
	[ $r = 0 ] && ! dmesg | grep 'refuses to serve g:'; }
# Two names of 64 bytes that differ in the last one only.
names() { long=$(printf %063d 0 | tr 0 n); truncate -s 8M /tmp/g; printf %s ${long}a > $P/name; named; r=$?; printf self > $P/name; return $r; }
named() { serve g /tmp/g ${long}b && mkdir $C/devices/g && echo ${long}a > $C/devices/g/peer && echo g > $C/devices/g/export && echo 1 > $C/devices/g/enable || return 1
	i=0; until dmesg | grep 'refuses to serve g: no export of that name for this VM'; do i=$((i+1)); [ $i -gt 150 ] && return 1; sleep 0.1; done
	is $C/devices/g/state seeking && echo 0 > $C/exports/g/enable && echo ${long}a > $C/exports/g/clients && echo 1 > $C/exports/g/enable && becomes $C/devices/g/state live; }
apart() { for d in $C/devices/* $C/exports/*; do rmdir $d || return 1; done; rmmod mmblk && rmmod neigh_loop; }
silent() { ! dmesg | grep -A25 -e BUG: -e Oops -e WARNING: -e 'Call Trace' -e 'blocked for more' -e refcount_t; }

mount -t configfs none /sys/kernel/config 2>/dev/null
insmod ./neigh_loop.ko && insmod ./mmblk.ko || exit 1
check "a block device is served and attached" eval "serve v $DISK && attach v"
check "random writes are read back right" verify v
check "a file system" fs v
check "zeroes and discard" zeroes v
check "writes by reference, reads copied once" by_reference v
echo 5 > $P/most
check "a ring that is nearly always full" verify v --size=2M
echo 512 > $P/most; echo 1 > $P/unreachable
check "memory that can't be reached is copied" copied v
echo 0 > $P/unreachable
check "the link dies six times under load" dies v
check "the export goes under load, and is back" away v
check "without a wait requests fail until it is back" no_wait v
check "a file" file
check "a file system under a file is frozen and thawed" frozen
check "a DETACH that is refused is no ATTACH" detached
check "names of 64 bytes are told apart" names
check "a read-only export" read_only
check "an export for others" denied
check "everything can be taken apart" apart
check "the kernel has nothing to say" silent
echo "1..$n"
exit $((failed > 0))
