#!/bin/sh
# The first process of the router: User-mode Linux on the machine's own files. Ends when its input ends.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc
insmod "/usr/lib/uml/modules/$(uname -r)/kernel/net/sched/sch_netem.ko"
echo 1 >/proc/sys/net/ipv4/ip_forward
for side in 0 1; do
    ip address add "10.9.$((side + 1)).254/24" dev "vec$side"
    ip link set "vec$side" up
    # shellcheck disable=SC2046 # The words of netem, which came with commas between them.
    tc qdisc add dev "vec$side" root netem limit 50000 $(echo "$netem" | tr , " ") || exit 1
done
echo ROUTING
read -r _
tc -s qdisc show
echo END
exec /sbin/poweroff -f
