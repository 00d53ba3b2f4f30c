//! The decision, over intervals that are made up.

use proptest::prelude::*;

use super::*;

/// Pause between two tellings, nanoseconds.
const BEAT: u64 = 25_000_000;

/// What one node's vCPUs spend their time with in a beat, in thousandths: waiting for pages that were there, spinning, waiting for first pages. The rest is work.
#[derive(Debug, Clone, Copy, Default)]
struct Life {
    waits: u64,
    spins: u64,
    first: u64,
}

const fn life(waits: u64, spins: u64, first: u64) -> Life {
    Life { waits, spins, first }
}

/// Watches nodes that live so, beat by beat.
struct Nodes {
    watch: Watch,
    told: Vec<Told>,
}

impl Nodes {
    /// So many vCPUs on each.
    fn new(vcpus: &[u32]) -> Self {
        let told = vcpus.iter().map(|vcpus| Told { vcpus: *vcpus, ..Told::default() }).collect();
        let mut nodes = Self { watch: Watch::new(u8::try_from(vcpus.len()).unwrap()), told };
        nodes.tell();
        nodes
    }

    fn tell(&mut self) -> Decision {
        let told: Vec<_> = (0..).zip(&self.told).map(|(node, told)| self.watch.told(node, *told)).collect();
        if told.contains(&Decision::Gather) { Decision::Gather } else { Decision::Stay }
    }

    /// One beat, of which the host gives vCPUs half.
    fn beat(&mut self, lives: &[Life]) -> Decision {
        for (told, life) in self.told.iter_mut().zip(lives) {
            let part = |share: u64| BEAT * u64::from(told.vcpus) * share / 2_000;
            let work = 1_000_u64.saturating_sub(life.waits + life.spins + life.first);
            told.at += BEAT;
            told.ran += part(work);
            told.spun += part(life.spins);
            told.waited += part(life.waits);
            told.first += part(life.first);
        }
        self.tell()
    }

    /// After how many milliseconds of this it is decided, within 20 s.
    fn decided(&mut self, lives: &[Life]) -> Option<u64> {
        (1..=800_u64).find(|_| self.beat(lives) == Decision::Gather).map(|beats| beats * BEAT / 1_000_000)
    }
}

fn decided(lives: &[Life]) -> Option<u64> {
    Nodes::new(&vec![1; lives.len()]).decided(lives)
}

/// What pays stays apart, also while it fetches what it never had, or while one works and the others wait for it.
#[test]
fn programs_that_pay_stay() {
    for pays in [
        &[life(0, 0, 0), life(0, 0, 0)][..],
        &[life(250, 0, 0), life(250, 0, 0)],
        &[life(0, 0, 0), life(400, 200, 0)],
        &[life(450, 0, 0), life(450, 0, 0)],
        &[life(0, 0, 0), life(0, 1000, 0)],
        &[life(0, 0, 900), life(0, 0, 1000)],
        &[life(300, 400, 0); 4],
    ] {
        assert_eq!(decided(pays), None, "{pays:?}");
    }
}

/// What loses is brought together: soon when it loses nearly all, later when it loses little, and within 1 s when it gets less than four fifths done of what node 0
/// would do alone.
#[test]
fn programs_that_lose_come_together_the_sooner_the_more_they_lose() {
    for (loses, within) in [
        (&[life(1000, 0, 0), life(1000, 0, 0)][..], 25..=50),
        (&[life(900, 0, 0), life(900, 0, 0)], 50..=75),
        (&[life(150, 750, 0), life(150, 750, 0)], 50..=75),
        (&[life(500, 450, 0), life(450, 500, 0)], 25..=50),
        (&[life(700, 0, 0), life(600, 0, 0)], 75..=100),
        (&[life(600, 0, 0), life(600, 0, 0)], 150..=175),
        (&[life(800, 100, 0); 4], 50..=75),
        (&[life(0, 900, 0), life(900, 0, 0)], 50..=75),
    ] {
        let at = decided(loses);
        assert!(at.is_some_and(|at| within.contains(&at)), "{loses:?}: {at:?}");
    }
}

/// One interval that is all exchange decides nothing, as a program may begin with it; a second one does, and so does a single one that lasts longer.
#[test]
fn a_program_may_begin_with_an_exchange() {
    let [all, half, none] = [life(1000, 0, 0), life(550, 0, 0), life(0, 0, 0)].map(|life| [life; 2]);
    let mut nodes = Nodes::new(&[1, 1]);
    assert_eq!(nodes.beat(&all), Decision::Stay);
    assert!((0..40).all(|_| nodes.beat(&none) == Decision::Stay));
    let mut nodes = Nodes::new(&[1, 1]);
    assert_eq!([all, half].map(|lives| nodes.beat(&lives)), [Decision::Stay, Decision::Gather]);
    let mut nodes = Nodes::new(&[1, 1]);
    for told in &mut nodes.told {
        told.at += 2 * BEAT;
        told.waited += 2 * BEAT;
    }
    assert_eq!(nodes.tell(), Decision::Gather);
}

/// One long interval of a program that little but works, at whose only look all happened to be at a barrier, decides nothing; a second one does.
#[test]
fn one_moment_of_spinning_decides_nothing() {
    let long = |nodes: &mut Nodes| {
        for told in &mut nodes.told {
            told.at += 4 * BEAT;
            told.spun += BEAT * 36 / 10;
            told.waited += BEAT * 4 / 10;
        }
        nodes.tell()
    };
    let [exchange, none] = [life(150, 800, 0), life(0, 0, 0)].map(|life| [life; 2]);
    let mut nodes = Nodes::new(&[1, 1]);
    assert_eq!(long(&mut nodes), Decision::Stay);
    assert!(nodes.watch.lost >= SUDDEN * WHOLES);
    assert!((0..40).all(|_| nodes.beat(&none) == Decision::Stay));
    assert!(nodes.watch.lost < 0);
    let mut nodes = Nodes::new(&[1, 1]);
    assert_eq!([long(&mut nodes), nodes.beat(&exchange)], [Decision::Stay, Decision::Gather]);
    let mut nodes = Nodes::new(&[1, 1]);
    assert_eq!([long(&mut nodes), long(&mut nodes)], [Decision::Stay, Decision::Gather]);
}

/// Who spins doesn't work: with the same waits a program that spins otherwise is brought together, and one that works otherwise isn't.
#[test]
fn spinning_is_told_from_work() {
    assert_eq!(decided(&[life(150, 0, 0); 2]), None);
    assert!(decided(&[life(150, 800, 0); 2]).is_some_and(|at| at <= 75));
}

/// Waits for first pages are neither work nor loss: what a program does in the rest of the time decides, and takes the longer the less of it there is; where one node does nothing else,
/// nothing is decided.
#[test]
fn first_pages_say_nothing() {
    assert_eq!(decided(&[life(180, 0, 520); 2]), None, "works twice as long as it waits again");
    assert_eq!(decided(&[life(900, 0, 0); 2]), Some(50));
    assert!(decided(&[life(450, 0, 500); 2]).is_some_and(|at| (50..=75).contains(&at)));
    assert!(decided(&[life(90, 0, 900); 2]).is_some_and(|at| (200..=250).contains(&at)));
    assert_eq!(decided(&[life(0, 0, 1000), life(900, 0, 0)]), None);
    // What it would gain if it went on like this isn't gained yet.
    let mut nodes = Nodes::new(&[1, 1]);
    assert!((0..100).all(|_| nodes.beat(&[life(0, 0, 450); 2]) == Decision::Stay));
    assert_eq!(nodes.watch.lost, 0);
}

/// A program may lose what it has gained: one that exchanges much for a moment stays, however often. Only clear gains count, and they are spent in the end.
#[test]
fn what_was_gained_may_be_lost() {
    let [pays, loses, serial] =
        [[life(0, 0, 0); 2], [life(1000, 0, 0); 2], [life(0, 30, 0), life(0, 960, 0)]];
    let mut nodes = Nodes::new(&[1, 1]);
    for _ in 0..20 {
        assert_eq!((0..40).find(|_| nodes.beat(&pays) == Decision::Gather), None);
        assert_eq!((0..12).find(|_| nodes.beat(&loses) == Decision::Gather), None);
    }
    assert_eq!((0..40).find(|_| nodes.beat(&pays) == Decision::Gather), None);
    assert_eq!(nodes.decided(&loses), Some(325));
    let mut nodes = Nodes::new(&[1, 1]);
    assert!((0..100).all(|_| nodes.beat(&serial) == Decision::Stay));
    assert_eq!(nodes.decided(&loses), Some(50), "one works, the other waits for it");
}

/// Bad phases that lose less than good ones gain decide nothing; a long one does.
#[test]
fn phases_that_pay_take_back_what_others_have_lost() {
    let [bad, good] = [[life(900, 0, 0); 2], [life(0, 0, 0); 2]];
    let mut nodes = Nodes::new(&[2, 2]);
    for (beats, life) in
        [(1, &bad), (1, &good)].repeat(20).into_iter().chain([(5, &good), (5, &bad)].repeat(20))
    {
        assert_eq!((0..beats).find(|_| nodes.beat(life) == Decision::Gather), None);
    }
    assert_eq!((0..5).find(|_| nodes.beat(&good) == Decision::Gather), None);
    assert!(nodes.decided(&bad).is_some_and(|at| at <= 475));
    // In the first phase nothing has been gained.
    assert_eq!(Nodes::new(&[2, 2]).decided(&bad), Some(50));
}

/// Nothing is decided without news of all nodes, where node 0 runs nothing, or where the others run nothing; nor while all stand still.
#[test]
fn who_runs_nothing_is_not_waited_for() {
    let mut nodes = Nodes::new(&[1, 1]);
    nodes.watch = Watch::new(3);
    assert_eq!(nodes.decided(&[life(900, 0, 0); 2]), None);
    assert_eq!(nodes.watch.told(3, Told::default()), Decision::Stay, "a node that isn't one");
    for vcpus in [[0, 1], [1, 0], [0, 0]] {
        assert_eq!(Nodes::new(&vcpus).decided(&[life(900, 0, 0); 2]), None, "{vcpus:?}");
    }
    // All stand still.
    let mut nodes = Nodes::new(&[1, 1]);
    for _ in 0..100 {
        nodes.told.iter_mut().for_each(|told| told.at += BEAT);
        assert_eq!(nodes.tell(), Decision::Stay);
    }
}

/// A node whose vCPUs have no processor does nothing for a matter of the host's, not the program's: whoever waits for it meanwhile has no reason to leave.
#[test]
fn who_is_kept_from_its_processor_is_taken_to_work() {
    let mut nodes = Nodes::new(&[1, 1]);
    for _ in 0..200 {
        nodes.told[1].at += BEAT;
        nodes.told[0].at += BEAT;
        nodes.told[0].waited += BEAT;
        assert_eq!(nodes.tell(), Decision::Stay);
    }
}

/// Where the host gives vCPUs next to no processor, waits and work come in turns of longer than an interval; both are seen together. One that gets half done stays no longer than it
/// would elsewhere, and one that works stays.
#[test]
fn little_time_is_added_up_before_it_is_judged() {
    let decided = |waits: u64| {
        let mut nodes = Nodes::new(&[1, 1]);
        (1..=400_u64).find(|beat| {
            for told in &mut nodes.told {
                told.at += BEAT;
                // A hundredth of the time is known, and what it was spent with changes from beat to beat.
                let known = BEAT / 100;
                if beat % 5 < waits { told.waited += known } else { told.ran += known }
            }
            nodes.tell() == Decision::Gather
        })
    };
    assert_eq!(decided(1), None);
    assert!(decided(4).is_some_and(|beats| beats * BEAT <= 600_000_000));
}

/// Numbers that can't be (a clock that goes back, more waits than time) neither panic nor decide by themselves.
#[test]
fn numbers_that_can_not_be_are_taken_for_a_new_beginning() {
    let mut watch = Watch::new(2);
    for step in 0..1000_u64 {
        let at = if step % 2 == 0 { u64::MAX } else { step };
        let told = Told { at, ran: u64::MAX, waited: u64::MAX - step, vcpus: u32::MAX, ..Told::default() };
        assert_eq!(watch.told(1, told), Decision::Stay);
        let told = Told { at: step * BEAT, vcpus: 1, ..Told::default() };
        assert_eq!(watch.told(0, told), Decision::Stay);
    }
    let most = Told {
        at: u64::MAX,
        ran: u64::MAX,
        spun: u64::MAX,
        waited: u64::MAX,
        first: u64::MAX,
        vcpus: u32::MAX,
    };
    let mut watch = Watch::new(2);
    for node in [0, 1] {
        watch.told(node, Told { vcpus: u32::MAX, ..Told::default() });
    }
    for node in [0, 1] {
        watch.told(node, most);
    }
}

#[test]
fn what_is_told_arrives() {
    let told = Told { at: 1 << 40, ran: 2, spun: 3, waited: 4, first: u64::MAX, vcpus: 6 };
    assert_eq!(Told::from_bytes(&told.to_bytes()), Some(told));
    let mut bytes = told.to_bytes();
    assert_eq!(Told::from_bytes(&bytes[..40]), None);
    bytes[44] = 1;
    assert_eq!(Told::from_bytes(&bytes), None, "more vCPUs than there can be");
}

/// Shares that come to a whole at the most.
fn any_life() -> impl Strategy<Value = Life> {
    (0..=1000_u64, 0..=1000_u64, 0..=1000_u64, 0..=1000_u64).prop_map(|(waits, spins, first, work)| {
        let all = (waits + spins + first + work).max(1);
        life(waits * 1000 / all, spins * 1000 / all, first * 1000 / all)
    })
}

/// Lives of three nodes, and for each what of its work, its spinning and its first waits turns into waiting.
fn any_beats() -> impl Strategy<Value = Vec<[(Life, [u64; 3]); 3]>> {
    let one = || (any_life(), [0..=1000_u64, 0..=1000_u64, 0..=1000_u64]);
    proptest::collection::vec([one(), one(), one()], 1..60)
}

/// The same with more waiting.
fn worse((life, [work, spins, first]): (Life, [u64; 3])) -> Life {
    let works = 1000 - life.waits - life.spins - life.first;
    let moved = [works * work / 1000, life.spins * spins / 1000, life.first * first / 1000];
    Life {
        waits: life.waits + moved.iter().sum::<u64>(),
        spins: life.spins - moved[1],
        first: life.first - moved[2],
    }
}

proptest! {
    /// More waiting, in whatever place of whatever was done instead, never turns *gather* into *stay*.
    #[test]
    fn more_waiting_never_keeps_a_program_apart(beats in any_beats(), vcpus in [1..5_u32, 1..5_u32, 1..5_u32]) {
        let (mut some, mut more) = (Nodes::new(&vcpus), Nodes::new(&vcpus));
        for beat in beats {
            let one = some.beat(&beat.map(|(life, _)| life));
            let other = more.beat(&beat.map(worse));
            prop_assert!(more.watch.lost >= some.watch.lost, "{} {}", more.watch.lost, some.watch.lost);
            prop_assert!(one == Decision::Stay || other == Decision::Gather);
        }
    }

    /// Without waits for pages that were here before a program stays, whatever else it does.
    #[test]
    fn who_waits_for_nothing_again_stays(beats in any_beats(), vcpus in [1..5_u32, 1..5_u32, 1..5_u32]) {
        let mut nodes = Nodes::new(&vcpus);
        for beat in beats {
            let decision = nodes.beat(&beat.map(|(life, _)| Life { waits: 0, ..life }));
            prop_assert_eq!(decision, Decision::Stay);
            prop_assert!(nodes.watch.lost <= 0);
        }
    }

    /// Who loses is brought together in bounded time, whatever went before: the loss has to come to 15 to 25 ms of each of node 0's vCPUs, and 0.25 s more at the most if as much was gained.
    #[test]
    fn what_loses_is_decided_in_bounded_time(beats in any_beats(), vcpus in [1..5_u32, 1..5_u32, 1..5_u32]) {
        let mut nodes = Nodes::new(&vcpus);
        for beat in beats {
            nodes.beat(&beat.map(|(life, _)| life));
        }
        // All together get half of what node 0 would do alone done.
        let all: u32 = vcpus.iter().sum();
        let work = 1000 * u64::from(vcpus[0]) / u64::from(all) / 2;
        let at = nodes.decided(&[life(1000 - work, 0, 0); 3]);
        prop_assert!(at.is_some_and(|at| at <= 800), "{:?}", at);
    }
}
