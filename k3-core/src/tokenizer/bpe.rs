//! Byte-pair merging of one piece (spec 5.3).
//!
//! ```text
//! if the whole piece is a token: emit it
//! parts = the single bytes
//! while some pair of neighbours, joined, is a token:
//!     join the pair whose token has the lowest rank, the leftmost among equals
//! emit the parts
//! ```
//!
//! Said so it is quadratic. Three ways of doing it, which agree:
//!
//! * **A window** of up to [`WINDOW`] bytes: the rank of each part joined with its right neighbour
//!   lies in one array, of which the minimum is taken; which bytes still start a part is one word of
//!   bits. Joined parts are looked up by their two ranks (see `vocab`), not by their bytes.
//! * **Windows in a row** for a longer piece. The last token of a window is dropped, as what follows
//!   it may have changed it, and the next window begins there. Let `L` be the last token that is kept
//!   and `F` the first one of the next window: if merging the bytes of these two alone gives `L F`,
//!   what lies left and right of them does not meet in merging the whole either. For up to the first
//!   merge across the border both sides go their own way, and whether that merge comes depends on
//!   bytes inside `L F` alone: the other ends of `L` and `F` are not crossed. If it fails, more tokens
//!   are dropped.
//! * **A tree** where windows do not help: where one token, or what the border may change, is as long
//!   as a window. The parts are a linked list over the bytes of the piece, and the rank of each part
//!   joined with its right neighbour is a leaf of a tree of minima with sixteen children a node, one
//!   cache line each. The lowest leftmost pair is found from the root down; a merge changes three
//!   leaves and the nodes above them. It asks for bytes, so it is also what the others are tested by.
//!
//! **Cost.** O(n) for n bytes by windows, and O(n log n + n L) by the tree, which a piece goes through
//! at most once; L is the longest token.

use super::vocab::{MAX_TOKENS, Merges, NO_RANK, Vocab};
use crate::carve::{BufferError, Carver, Line, Tally};

/// Counts what merging does, in tests: looks at keys of a window and at nodes of the tree.
#[cfg(test)]
mod steps {
    std::thread_local! {
        static DONE: core::cell::Cell<u64> = const { core::cell::Cell::new(0) };
    }

    pub(super) fn add(n: usize) {
        DONE.with(|done| done.set(done.get() + n as u64));
    }

    pub(super) fn take() -> u64 {
        DONE.with(core::cell::Cell::take)
    }
}

#[cfg(not(test))]
mod steps {
    #[inline(always)]
    pub(super) const fn add(_: usize) {}
}

/// Children of a node: sixteen `u32` are one cache line.
const WIDTH: usize = 16;

/// Rank of a pair that is no token, and of a byte that starts no part.
const NONE: u32 = NO_RANK;

/// Bytes of a window.
pub(super) const WINDOW: usize = 1 << PLACE_BITS;

/// Bits of a place in a window.
const PLACE_BITS: u32 = 6;

/// Tokens a window may lose at its end before windows are given up.
const DROPPED: usize = 6;

// A key is a rank above a place in a window, and below NONE.
const _: () = assert!(MAX_TOKENS << PLACE_BITS < NONE as usize);

/// Bytes up to which a piece needs no scratch memory.
pub const SHORT_PIECE: usize = 256;

/// Nodes of the tree over [`SHORT_PIECE`] leaves.
const SHORT_NODES: usize = 17;

/// Levels of a tree over as many bytes as a `u32` can count.
const LEVELS: usize = 8;

/// Nodes of a tree over `leaves`.
fn nodes(leaves: usize) -> usize {
    let (mut level, mut sum) = (leaves, 0usize);
    loop {
        level = level.div_ceil(WIDTH);
        sum = sum.saturating_add(level);
        if level <= 1 {
            return sum;
        }
    }
}

/// Lines of scratch for a piece of this many bytes (about 13 bytes a byte); `None` if they overflow.
pub(super) fn scratch_len(piece: usize) -> Option<usize> {
    if piece <= SHORT_PIECE {
        return Some(0);
    }
    Some(Tally::new().add::<u32>(piece)?.add::<u32>(piece)?.add::<[u32; WIDTH]>(nodes(piece))?.lines())
}

/// Memory for short pieces, so that they need none of the caller's.
pub(super) struct Short {
    next: [u32; SHORT_PIECE],
    previous: [u32; SHORT_PIECE],
    tree: [[u32; WIDTH]; SHORT_NODES],
}

impl Short {
    pub(super) const fn new() -> Self {
        Self { next: [0; SHORT_PIECE], previous: [0; SHORT_PIECE], tree: [[0; WIDTH]; SHORT_NODES] }
    }
}

/// Emits the ranks of one piece.
#[inline]
pub(super) fn merge(
    vocab: &Vocab<'_>,
    piece: &[u8],
    memory: &mut Memory,
    scratch: &mut [Line],
    emit: &mut impl FnMut(u32),
) -> Result<(), BufferError> {
    if piece.is_empty() {
        return Ok(());
    }
    if let Some(rank) = vocab.rank(piece) {
        emit(rank);
        return Ok(());
    }
    if piece.len() <= WINDOW {
        memory.window.merge(vocab.merges(), piece);
        memory.window.each(emit);
        return Ok(());
    }
    merge_long(vocab, piece, memory, scratch, emit)
}

#[inline(never)]
fn merge_long(
    vocab: &Vocab<'_>,
    piece: &[u8],
    memory: &mut Memory,
    scratch: &mut [Line],
    emit: &mut impl FnMut(u32),
) -> Result<(), BufferError> {
    let done = if piece.len() <= SHORT_PIECE {
        in_windows(vocab.merges(), piece, &mut memory.window, &mut memory.joint, &mut memory.short.next)
    } else {
        // The tree needs it all, so what is too little is said before anything is emitted.
        let given = scratch.len();
        let needed = scratch_len(piece.len()).ok_or(BufferError::Overflow)?;
        let scratch = scratch.get_mut(..needed).ok_or(BufferError::TooSmall { needed, given })?;
        let ids = Carver::new(scratch).take(piece.len())?;
        in_windows(vocab.merges(), piece, &mut memory.window, &mut memory.joint, ids)
    };
    let Some(count) = done else {
        return merge_by_bytes(vocab, piece, &mut memory.short, scratch, emit);
    };
    let ids = if piece.len() <= SHORT_PIECE {
        &memory.short.next[..]
    } else {
        Carver::new(scratch).take::<u32>(piece.len())?
    };
    ids.iter().take(count).for_each(|&id| emit(id));
    Ok(())
}

/// Merges `piece` by the tree. The piece itself counts as no token, whether it is one or not.
pub(super) fn merge_by_bytes(
    vocab: &Vocab<'_>,
    piece: &[u8],
    short: &mut Short,
    scratch: &mut [Line],
    emit: &mut impl FnMut(u32),
) -> Result<(), BufferError> {
    if piece.len() <= SHORT_PIECE {
        Parts::new(vocab, piece, &mut short.next, &mut short.previous, &mut short.tree).run(emit);
    } else {
        u32::try_from(piece.len()).map_err(|_| BufferError::Overflow)?;
        let mut carver = Carver::new(scratch);
        let next = carver.take(piece.len())?;
        let previous = carver.take(piece.len())?;
        let tree = carver.take(nodes(piece.len()))?;
        Parts::new(vocab, piece, next, previous, tree).run(emit);
    }
    Ok(())
}

/// Merges `piece` in windows and puts its ranks to the front of `ids`; how many there are. `None` if
/// windows do not help.
fn in_windows(
    merges: &Merges<'_>,
    piece: &[u8],
    window: &mut Window,
    joint: &mut Window,
    ids: &mut [u32],
) -> Option<usize> {
    let (mut count, mut from) = (0usize, 0usize);
    let mut bytes = piece.get(..WINDOW.min(piece.len()))?;
    window.merge(merges, bytes);
    loop {
        if from.saturating_add(bytes.len()) >= piece.len() {
            window.each(&mut |rank| {
                if let Some(place) = ids.get_mut(count) {
                    *place = rank;
                }
                count = count.saturating_add(1);
            });
            return Some(count);
        }
        // Where the tokens start, of which the last ones may be wrong.
        let (mut starts, ranks) = (window.starts, window.ranks);
        let mut begins = None;
        for _ in 0..DROPPED {
            let next = highest(starts)?;
            starts ^= 1 << next;
            let last = highest(starts)?;
            let begin = from.saturating_add(next);
            bytes = piece.get(begin..begin.saturating_add(WINDOW).min(piece.len()))?;
            window.merge(merges, bytes);
            let first = window.second().unwrap_or(bytes.len());
            let both = piece.get(from.saturating_add(last)..begin.saturating_add(first))?;
            if both.len() > WINDOW {
                return None;
            }
            joint.merge(merges, both);
            if joint.starts == 1 | 1u64.checked_shl(u32::try_from(next.checked_sub(last)?).ok()?)? {
                begins = Some(begin);
                break;
            }
        }
        from = begins?;
        while starts != 0 {
            let at = starts.trailing_zeros() as usize;
            starts &= starts.wrapping_sub(1);
            if let (Some(place), Some(&rank)) = (ids.get_mut(count), ranks.get(at)) {
                *place = rank;
            }
            count = count.saturating_add(1);
        }
    }
}

/// The highest bit that is set.
#[inline]
fn highest(bits: u64) -> Option<usize> {
    bits.checked_ilog2().map(|bit| bit as usize)
}

/// Memory for pieces that need none of the caller's.
pub(super) struct Memory {
    window: Window,
    joint: Window,
    short: Short,
}

impl Memory {
    pub(super) const fn new() -> Self {
        Self { window: Window::new(), joint: Window::new(), short: Short::new() }
    }
}

/// Up to [`WINDOW`] bytes while they are merged, and what they became.
pub(super) struct Window {
    /// Bit i: a part starts at byte i.
    starts: u64,
    /// The rank of the part that starts at a byte.
    ranks: [u32; WINDOW],
    /// The rank of that part joined with the one behind it, above the place; or [`NONE`]. The lowest
    /// of them is the leftmost of the lowest rank.
    keys: [[u32; WIDTH]; WINDOW / WIDTH],
}

impl Window {
    pub(super) const fn new() -> Self {
        Self { starts: 0, ranks: [0; WINDOW], keys: [[NONE; WIDTH]; WINDOW / WIDTH] }
    }

    /// Merges at least one byte, and at most [`WINDOW`].
    #[expect(clippy::cast_possible_truncation, reason = "places in a window are below 64")]
    #[inline]
    pub(super) fn merge(&mut self, merges: &Merges<'_>, piece: &[u8]) {
        let used = piece.len().div_ceil(WIDTH).min(WINDOW / WIDTH);
        self.starts = u64::MAX.wrapping_shr((1u32 << PLACE_BITS).wrapping_sub(piece.len() as u32));
        for (rank, &byte) in self.ranks.iter_mut().zip(piece) {
            *rank = merges.byte(byte);
        }
        for keys in self.keys.iter_mut().take(used) {
            *keys = [NONE; WIDTH];
        }
        let pairs = piece.iter().zip(piece.iter().skip(1)).zip(0u32..);
        for (key, ((&left, &right), at)) in self.keys.as_flattened_mut().iter_mut().zip(pairs) {
            *key = keyed(merges.bytes(left, right), at);
        }
        steps::add(used);
        // Most pieces have one line of keys, and a loop that knows it.
        match used {
            1 => self.join(merges, 1),
            _ => self.join(merges, used),
        }
    }

    /// Joins parts until no two neighbours are a token. The first `used` lines of keys may have one.
    #[inline(always)]
    fn join(&mut self, merges: &Merges<'_>, used: usize) {
        loop {
            steps::add(used);
            let low = self.keys.iter().take(used).fold(NONE, |low, keys| low.min(minimum(keys)));
            if low == NONE {
                return;
            }
            let (at, rank) = (low & ((1 << PLACE_BITS) - 1), low >> PLACE_BITS);
            // The part behind goes; the one behind that is the new neighbour.
            let behind = self.starts & (u64::MAX - 1).wrapping_shl(at);
            let rest = behind & behind.wrapping_sub(1);
            let gone = behind.trailing_zeros();
            self.starts &= !(behind ^ rest);
            self.set_key(gone, NONE);
            self.set_rank(at, rank);
            let key = if rest == 0 { NONE } else { keyed(merges.pair(rank, self.rank(rest.trailing_zeros())), at) };
            self.set_key(at, key);
            if let Some(before) = (self.starts & !u64::MAX.wrapping_shl(at)).checked_ilog2() {
                let key = keyed(merges.pair(self.rank(before), rank), before);
                self.set_key(before, key);
            }
        }
    }

    #[inline(always)]
    fn rank(&self, at: u32) -> u32 {
        self.ranks.get(at as usize % WINDOW).copied().unwrap_or(NONE)
    }

    #[inline(always)]
    fn set_rank(&mut self, at: u32, rank: u32) {
        if let Some(place) = self.ranks.get_mut(at as usize % WINDOW) {
            *place = rank;
        }
    }

    #[inline(always)]
    fn set_key(&mut self, at: u32, key: u32) {
        if let Some(place) = self.keys.as_flattened_mut().get_mut(at as usize % WINDOW) {
            *place = key;
        }
    }

    /// The ranks of the parts, in order.
    #[inline]
    fn each(&self, emit: &mut impl FnMut(u32)) {
        let mut starts = self.starts;
        while starts != 0 {
            emit(self.rank(starts.trailing_zeros()));
            starts &= starts.wrapping_sub(1);
        }
    }

    /// Where the second part starts.
    fn second(&self) -> Option<usize> {
        let rest = self.starts & self.starts.wrapping_sub(1);
        (rest != 0).then_some(rest.trailing_zeros() as usize)
    }

    /// The ranks of the parts, if there are two.
    pub(super) fn two(&self) -> Option<(u32, u32)> {
        let second = self.starts & self.starts.wrapping_sub(1);
        second.is_power_of_two().then(|| (self.rank(0), self.rank(second.trailing_zeros())))
    }
}

/// A rank above a place.
#[inline(always)]
fn keyed(rank: u32, at: u32) -> u32 {
    if rank == NONE { NONE } else { rank << PLACE_BITS | at }
}

/// The parts of a piece while it is being merged.
///
/// A part is named by its first byte. `next` says where the part behind it starts (the length of
/// the piece, for the last one) and `previous` where the one before does. All reads outside give an
/// end and all writes outside do nothing, so a slip of logic here could give a wrong id but no panic.
struct Parts<'p> {
    vocab: &'p Vocab<'p>,
    piece: &'p [u8],
    next: &'p mut [u32],
    previous: &'p mut [u32],
    tree: &'p mut [[u32; WIDTH]],
    /// Where each level of the tree starts, the leaves first.
    level: [usize; LEVELS],
    levels: usize,
}

impl<'p> Parts<'p> {
    fn new(
        vocab: &'p Vocab<'p>,
        piece: &'p [u8],
        next: &'p mut [u32],
        previous: &'p mut [u32],
        tree: &'p mut [[u32; WIDTH]],
    ) -> Self {
        for (at, (next, previous)) in (0u32..).zip(next.iter_mut().zip(previous.iter_mut())).take(piece.len()) {
            *next = at.wrapping_add(1);
            *previous = at.wrapping_sub(1);
        }
        let whole = piece.len();
        let mut pairs = piece.windows(2).map(|pair| vocab.rank(pair).filter(|_| whole > 2).unwrap_or(NONE));
        let (mut level, mut levels) = ([0; LEVELS], 0usize);
        let (mut from, mut to) = (0usize, piece.len().div_ceil(WIDTH));
        for node in tree.iter_mut().take(to) {
            node.fill_with(|| pairs.next().unwrap_or(NONE));
        }
        loop {
            if let Some(start) = level.get_mut(levels) {
                *start = from;
            }
            levels = levels.saturating_add(1);
            let below = to.saturating_sub(from);
            if below <= 1 {
                break;
            }
            let end = to.saturating_add(below.div_ceil(WIDTH));
            if let Some((done, above)) = tree.split_at_mut_checked(to) {
                let mut minima = done.get(from..).unwrap_or_default().iter().map(minimum);
                for node in above.iter_mut().take(below.div_ceil(WIDTH)) {
                    node.fill_with(|| minima.next().unwrap_or(NONE));
                }
            }
            (from, to) = (to, end);
        }
        Self { vocab, piece, next, previous, tree, level, levels }
    }

    fn run(mut self, emit: &mut impl FnMut(u32)) {
        while let Some(at) = self.lowest() {
            self.join(at);
        }
        let mut at = 0;
        while at < self.piece.len() {
            let end = self.after(at);
            if let Some(rank) = self.piece.get(at..end).and_then(|part| self.vocab.rank(part)) {
                emit(rank);
            }
            at = end;
        }
    }

    #[inline]
    fn after(&self, at: usize) -> usize {
        self.next.get(at).map_or(self.piece.len(), |&n| n as usize).min(self.piece.len())
    }

    /// The part whose pair has the lowest rank, the leftmost among equals.
    #[inline]
    fn lowest(&self) -> Option<usize> {
        let mut at = 0usize;
        for &start in self.level.get(..self.levels)?.iter().rev() {
            steps::add(1);
            let node = self.tree.get(start.saturating_add(at))?;
            let low = minimum(node);
            if low == NONE {
                return None;
            }
            let lane = node.iter().position(|&rank| rank == low)?;
            at = at.saturating_mul(WIDTH).saturating_add(lane);
        }
        Some(at)
    }

    /// Joins the part at `at` with the one behind it.
    #[expect(clippy::cast_possible_truncation, reason = "positions in a piece were checked to fit")]
    fn join(&mut self, at: usize) {
        let gone = self.after(at);
        let end = self.after(gone);
        if let Some(next) = self.next.get_mut(at) {
            *next = end as u32;
        }
        if let Some(previous) = self.previous.get_mut(end).filter(|_| end < self.piece.len()) {
            *previous = at as u32;
        }
        self.set(gone, NONE);
        self.set(at, self.pair(at, end));
        if at > 0 {
            let before = self.previous.get(at).map_or(0, |&p| p as usize);
            self.set(before, self.pair(before, at));
        }
    }

    /// The rank of the part at `at` joined with the part at `middle`.
    #[inline]
    fn pair(&self, at: usize, middle: usize) -> u32 {
        if middle >= self.piece.len() {
            return NONE;
        }
        let joined = self.piece.get(at..self.after(middle)).filter(|joined| joined.len() < self.piece.len());
        joined.and_then(|joined| self.vocab.rank(joined)).unwrap_or(NONE)
    }

    /// Sets a leaf and the minima above it.
    #[inline]
    fn set(&mut self, leaf: usize, rank: u32) {
        let (mut at, mut value) = (leaf, rank);
        let mut levels = self.level.get(..self.levels).unwrap_or_default().iter();
        while let Some(start) = levels.next() {
            let (parent, lane) = (at.wrapping_div(WIDTH), at.wrapping_rem(WIDTH));
            let Some(node) = self.tree.get_mut(start.saturating_add(parent)) else { return };
            let Some(slot) = node.get_mut(lane) else { return };
            if *slot == value {
                return;
            }
            steps::add(1);
            *slot = value;
            // Nothing is kept above the root.
            if !levels.as_slice().is_empty() {
                value = minimum(node);
            }
            at = parent;
        }
    }
}

#[inline]
fn minimum(node: &[u32; WIDTH]) -> u32 {
    node.iter().fold(NONE, |a, &b| a.min(b))
}

#[cfg(test)]
mod tests {
    use super::super::vocab::tests::{file, load, tokens};
    use super::*;
    use std::vec::Vec;

    /// The definition at the module's head, word for word.
    fn naive(vocab: &Vocab<'_>, piece: &[u8]) -> Vec<u32> {
        if let Some(rank) = vocab.rank(piece) {
            return std::vec![rank];
        }
        let mut parts: Vec<Vec<u8>> = piece.iter().map(|&b| std::vec![b]).collect();
        loop {
            let pairs = parts.windows(2).enumerate().filter_map(|(i, w)| Some((vocab.rank(&w.concat())?, i)));
            let Some((_, i)) = pairs.min() else { break };
            let right = parts.remove(i + 1);
            parts[i].extend(right);
        }
        parts.iter().map(|p| vocab.rank(p).unwrap()).collect()
    }

    fn merged(vocab: &Vocab<'_>, piece: &[u8]) -> Vec<u32> {
        let mut scratch = std::vec![bytemuck::cast([0x5au8; 64]); scratch_len(piece.len()).unwrap()];
        let (mut ids, mut by_bytes) = (Vec::new(), Vec::new());
        merge(vocab, piece, &mut Memory::new(), &mut scratch, &mut |id| ids.push(id)).unwrap();
        if !piece.is_empty() && vocab.rank(piece).is_none() {
            merge_by_bytes(vocab, piece, &mut Short::new(), &mut scratch, &mut |id| by_bytes.push(id)).unwrap();
            assert!(ids == by_bytes, "the tree");
        }
        ids
    }

    struct Xorshift(u64);

    impl Xorshift {
        fn below(&mut self, n: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            usize::try_from(self.0 >> 33).unwrap() % n
        }
    }

    #[test]
    fn equals_naive_merging_on_random_vocabularies() {
        // The naive way is slow enough where the processor is its own; others are usually emulated.
        let seeds = if cfg!(target_arch = "x86_64") { 60 } else { 6 };
        for seed in 1..=seeds {
            let mut rng = Xorshift(0x9e37_79b9_7f4a_7c15u64.wrapping_mul(seed));
            let letters = 2 + rng.below(3);
            let longest = 2 + rng.below(7);
            let mut all = tokens(&[]);
            for _ in 0..rng.below(200) {
                let token: Vec<u8> = (0..2 + rng.below(longest)).map(|_| b"abcd"[rng.below(letters)]).collect();
                if !all.contains(&token) {
                    all.push(token);
                }
            }
            // Any order of ranks, single bytes not first.
            for i in (1..all.len()).rev() {
                all.swap(i, rng.below(i + 1));
            }
            let vocab = load(&file(&all), &mut Vec::new()).unwrap();
            // The naive way takes its time over long pieces: not for every vocabulary.
            let long = if seed % 6 == 0 { &[255, 256, 257, 258, 300, 511, 512, 513][..] } else { &[] };
            for len in (0..=67).chain(long.iter().copied()) {
                let piece: Vec<u8> = (0..len).map(|_| b"abcd"[rng.below(letters)]).collect();
                assert_eq!(merged(&vocab, &piece), naive(&vocab, &piece), "seed {seed} len {len}");
            }
        }
    }

    #[test]
    fn a_megabyte_is_one_piece_like_any_other() {
        let vocab = load(&file(&tokens(&[b"aa", b"aaaa", b"aaaaaaaa", b"ab"])), &mut Vec::new()).unwrap();
        let mut piece = std::vec![b'a'; 1 << 20];
        piece.push(b'b');
        let ids = merged(&vocab, &piece);
        // "ab" has the highest rank: the last two letters are left for it only if they are left over.
        assert_eq!(ids.len(), (1 << 17) + 1);
        assert!(ids[..1 << 17].iter().all(|&id| id == 258));
    }

    /// The story: a piece of a million bytes took minutes in engines that look for the best pair again and
    /// again. Steps are counted, not seconds. Doubling a piece may double them; only the tree has a logarithm
    /// besides.
    #[test]
    fn long_pieces_take_linear_time() {
        // Emulators get short pieces, of which the tree's logarithm, and what happens once, is a larger part.
        let (length, most) = if cfg!(target_arch = "x86_64") { (1 << 17, 22) } else { (1 << 12, 26) };
        let mut rng = Xorshift(88_172_645_463_325_252);
        let mut random =
            |letters: &[u8]| -> Vec<u8> { (0..2 * length).map(|_| letters[rng.below(letters.len())]).collect() };
        // Fibonacci's word repeats itself at no distance: windows find borders late.
        let (mut a, mut b) = (std::vec![b'a'], std::vec![b'a', b'b']);
        while b.len() < 2 * length {
            (a, b) = (b.clone(), [b, a].concat());
        }
        b.truncate(2 * length);
        let pieces = [random(b"ab"), random(b"abcdefghijklmnopqrstuvwxyz"), std::vec![b'a'; 2 * length], b];
        let powers = |most: u32| -> Vec<Vec<u8>> { (1..=most).map(|i| std::vec![b'a'; 1 << i]).collect() };
        // Every string of two letters up to six bytes, the long ones first: each byte starts a chain of merges.
        let mut chains: Vec<Vec<u8>> = (2..=6u32)
            .flat_map(|n| (0..1u32 << n).map(move |bits| (0..n).map(|i| b'a' + (bits >> i & 1) as u8).collect()))
            .collect();
        chains.reverse();
        for (name, more) in
            [("bytes", Vec::new()), ("chains", chains), ("powers", powers(5)), ("long powers", powers(9))]
        {
            let mut all = tokens(&[b"in", b"th", b"he", b"the", b"ing"]);
            all.extend(more);
            let vocab = load(&file(&all), &mut Vec::new()).unwrap();
            for (which, piece) in pieces.iter().enumerate() {
                let mut scratch = std::vec![Line::ZERO; scratch_len(piece.len()).unwrap()];
                let mut count = |piece: &[u8]| {
                    steps::take();
                    merge(&vocab, piece, &mut Memory::new(), &mut scratch, &mut |_| ()).unwrap();
                    steps::take()
                };
                let (half, whole) = (count(&piece[..length]), count(piece));
                assert!(whole < most * half / 10, "{name}, piece {which}: {half} and {whole} steps");
                assert!(whole < 40 * piece.len() as u64, "{name}, piece {which}: {whole} steps");
            }
        }
    }

    #[test]
    fn too_little_scratch_is_an_error() {
        let vocab = load(&file(&tokens(&[])), &mut Vec::new()).unwrap();
        let needed = scratch_len(1000).unwrap();
        let mut scratch = std::vec![Line::ZERO; needed - 1];
        let err = merge(&vocab, &[b'x'; 1000], &mut Memory::new(), &mut scratch, &mut |_| ()).unwrap_err();
        assert_eq!(err, BufferError::TooSmall { needed, given: needed - 1 });
        assert_eq!(scratch_len(SHORT_PIECE), Some(0));
        assert_eq!(nodes(SHORT_PIECE), SHORT_NODES);
        assert_eq!(scratch_len(usize::MAX), None);
    }
}
