//! The memory plan: from a config and a budget to sizes, or a refusal with the numbers.
//!
//! Every byte the engine will ever hold is a line of the [`Ledger`], and the run allocates what the
//! ledger says and nothing else. Order of spending: what is fixed, the context, a ring for the
//! trunk, a minimum of experts; then whole layers are pinned, and `lm_head` once all of them are. What is
//! left when no other layer fits, or when all of the trunk is pinned, goes to the experts: last,
//! because a router spreads its choices on purpose. Where all of the trunk and `lm_head` can be pinned nothing
//! passes through a ring, and there is none.
//!
//! # Which layers are pinned
//!
//! Any fixed choice of N of L layers is found N times in L, since they are walked in a cycle. What differs
//! is when the disk works: it reads ahead as far as the ring has slots, so that while a row of pinned
//! layers is computed it soon stands still. So they lie apart, in the order of `spread`, and one that
//! is read follows each few that are not: a token then takes what the slower of disk and computation
//! takes, where a prefix would add the prefix's computation to the disk's time.

use crate::experts::Name;
use crate::policy::{Directory, Policy};
use crate::segment::Segment;
use crate::units::human;
use crate::walk::Walk;
use k3_core::carve::Line as CacheLine;
use k3_core::config::ModelConfig;
use k3_core::model::{Extent, Journal, State, Workspace};

/// What the process itself touches: code, heap, allocator, runtime (bytes). Checked against the peak
/// of real runs by the budget tests.
pub const PROCESS_BYTES: u64 = 14_000_000;

/// What a thread touches of its stack, with the allocator's share (bytes).
pub const THREAD_BYTES: u64 = 192 * 1024;

/// Pages of the system for each byte that is mapped: eight bytes for every 4096. A control group counts
/// them, though the resident memory of a process does not.
const PAGE_TABLES: u64 = 512;

/// A slot of the trunk's ring is not larger than this: enough for a disk's full speed, small enough
/// that computing can start early (bytes).
const SLOT_TARGET: usize = 16 << 20;

/// Slots of the ring when there is room: one being used, the others being filled.
const RING_TARGET: usize = 8;

/// Slots of the ring when there is a lot of room. While a pinned layer is computed the disk reads ahead
/// into them; so many hold what a fast disk brings in the time of a layer of the release.
const RING_MOST: usize = 48;

/// Sequences that run at the same time at most: with so many, a token's share of the trunk is less than
/// its experts.
pub const MOST_SEQUENCES: usize = 64;

/// What is asked of the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Peak memory that must not be passed (bytes).
    pub budget: u64,
    /// Positions of the longest sequence.
    pub context: usize,
    /// Positions that a chunk could use at most: the length of the prompt.
    pub prompt: usize,
    /// Forces the positions of a chunk.
    pub chunk: Option<usize>,
    /// Threads that compute.
    pub threads: usize,
    /// Threads that read.
    pub readers: usize,
    /// How experts are chosen to stay in memory.
    pub policy: Policy,
    /// Whether logits of all positions of a chunk are held at once, and not only the last one's.
    pub all_logits: bool,
    /// Ids that are guessed at most, to be read in one pass with the last one.
    pub speculate: usize,
    /// Sequences that are to run at the same time, at most. If there is no room for as many, fewer do.
    pub sequences: usize,
    /// What the process has touched of its own file besides its code (bytes).
    pub touched: u64,
    /// What is held besides the engine: a sampler's scratch, a session's buffer (bytes).
    pub beside: u64,
    /// What is held besides for each sequence that runs (bytes), the most first: they take turns, so of the
    /// sequences that run at the same time these may be the ones.
    pub beside_each: [u64; MOST_SEQUENCES],
}

/// What the plan must know about a checkpoint.
#[derive(Debug, Clone, Copy)]
pub struct Sizes<'a> {
    /// Its config.
    pub config: &'a ModelConfig,
    /// What a pass reads.
    pub walk: &'a Walk,
    /// Bytes of buffer for one expert.
    pub expert: usize,
    /// Bytes of the tensor index that are kept.
    pub index: u64,
    /// Bytes of the tokenizer that are kept.
    pub tokenizer: u64,
}

/// A line of the ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// What it is for.
    pub name: &'static str,
    /// Bytes.
    pub bytes: u64,
    /// How it comes about.
    pub note: String,
}

/// All that will be held.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ledger {
    /// In order of spending.
    pub entries: Vec<Entry>,
}

impl Ledger {
    fn add(&mut self, name: &'static str, bytes: u64, note: String) {
        self.entries.push(Entry { name, bytes, note });
    }

    /// The sum (bytes).
    #[must_use]
    pub fn total(&self) -> u64 {
        self.entries.iter().fold(0, |sum, e| sum.saturating_add(e.bytes))
    }
}

impl Ledger {
    /// The bytes of a line; 0 if there is none of that name.
    #[must_use]
    pub fn bytes_of(&self, name: &str) -> u64 {
        self.entries.iter().find(|e| e.name == name).map_or(0, |e| e.bytes)
    }
}

impl std::fmt::Display for Ledger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for e in &self.entries {
            writeln!(f, "  {:<14} {:>12}  {}", e.name, human(e.bytes), e.note)?;
        }
        write!(f, "  {:<14} {:>12}", "total", human(self.total()))
    }
}

/// Sizes that hold the budget.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The budget that was asked for (bytes).
    pub budget: u64,
    /// Chunk, context and threads of a pass.
    pub extent: Extent,
    /// Threads that read.
    pub readers: usize,
    /// Positions whose logits are held at once.
    pub logit_rows: usize,
    /// Ids that are guessed at most.
    pub speculate: usize,
    /// Sequences that run at the same time.
    pub sequences: usize,
    /// Bytes of a slot of the ring.
    pub slot: usize,
    /// Slots of the ring; none if all of the trunk is pinned.
    pub ring: usize,
    /// Which layers are pinned, in walk order; the last entry is `lm_head`.
    pub keeps: Vec<bool>,
    /// Experts the arena holds.
    pub arena: usize,
    /// How they are chosen to stay.
    pub policy: Policy,
    /// Bytes of the trunk and the head that one generated token reads from disk.
    pub trunk_read: u64,
    /// Bytes of experts that one generated token reads if none of its choice is in memory.
    pub experts_read: u64,
    /// Bytes that are mapped while it runs, piece by piece: the pinned trunk and the experts.
    pub mapped_later: u64,
    /// Everything, line by line.
    pub ledger: Ledger,
}

impl Plan {
    /// Number of pinned layers.
    #[must_use]
    pub fn pinned(&self) -> usize {
        let (_head, layers) = self.keeps.split_last().unwrap_or((&false, &[]));
        layers.iter().filter(|&&keeps| keeps).count()
    }

    /// Whether `lm_head` is pinned too.
    #[must_use]
    pub fn head_pinned(&self) -> bool {
        self.keeps.last().is_some_and(|&keeps| keeps)
    }
}

/// The budget cannot hold the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The budget that was asked for (bytes).
    pub budget: u64,
    /// The least that would do (bytes).
    pub floor: u64,
    /// Why.
    pub ledger: Ledger,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "a budget of {} ({} bytes) cannot hold this request; the least is {} ({} bytes):\n{}",
            human(self.budget),
            self.budget,
            human(self.floor),
            self.floor,
            self.ledger
        )
    }
}

impl std::error::Error for Refusal {}

fn lines(count: Option<usize>) -> u64 {
    count.map_or(u64::MAX, |n| (n as u64).saturating_mul(CacheLine::BYTES as u64))
}

/// Positions whose logits are held at once.
fn logit_rows(request: &Request, chunk: usize, sequences: usize) -> usize {
    if request.all_logits { chunk } else { sequences.max(request.speculate + 1) }
}

/// What is needed whatever the budget is, for a chunk of `chunk` positions.
fn fixed(sizes: &Sizes<'_>, request: &Request, chunk: usize, sequences: usize) -> Ledger {
    let c = sizes.config;
    let mut ledger = Ledger::default();
    let threads = (request.threads + request.readers) as u64;
    let mut note = format!("code and heap, {} computing and {} reading threads", request.threads, request.readers);
    if request.touched > 0 {
        note += &format!(", {} of included data", human(request.touched));
    }
    let process = PROCESS_BYTES.saturating_add(threads.saturating_mul(THREAD_BYTES)).saturating_add(request.touched);
    ledger.add("process", process, note);
    ledger.add("index", sizes.index, "where each tensor lies".to_owned());
    ledger.add("tokenizer", sizes.tokenizer, format!("{} ids", c.vocab_size));
    let experts = (c.num_moe_layers() as u64).saturating_mul(c.num_experts as u64);
    let scores = experts.saturating_mul(Directory::<Name>::SCORE_BYTES);
    ledger.add("expert scores", scores, format!("{experts} experts"));
    let states = lines(State::lines(c, 0));
    let note =
        format!("{} layers x {} heads x {} x {}", c.num_kda_layers(), c.kda_num_heads, c.kda_head_dim, c.kda_head_dim);
    let times = |bytes: u64| bytes.saturating_mul(sequences as u64);
    let many = if sequences > 1 { format!("{sequences} sequences x ") } else { String::new() };
    ledger.add("KDA states", times(states), format!("{many}{note}"));
    let latent = lines(State::lines(c, request.context)).saturating_sub(states);
    let per = 4 * (c.latent_width() * c.num_mla_layers()) as u64;
    ledger.add("context", times(latent), format!("{many}{} positions x {per} bytes", request.context));
    if request.speculate > 0 {
        let positions = request.speculate + 1;
        let journal = lines(Journal::lines(c, positions));
        ledger.add("journal", journal, format!("steps of {positions} positions, and one layer's states"));
    }
    let extent = Extent { chunk, context: request.context, width: request.threads };
    ledger.add("activations", lines(Workspace::lines(c, extent)), format!("chunks of {chunk} positions"));
    let buffers = chunk.min(request.readers.max(1));
    let bytes = (buffers as u64).saturating_mul(sizes.walk.row_buffer(2 * c.hidden_size) as u64);
    ledger.add("embedding", bytes, format!("{buffers} of its rows at a time"));
    let rows = logit_rows(request, chunk, sequences);
    let each = request.beside_each.iter().take(sequences).fold(request.beside, |sum, each| sum.saturating_add(*each));
    if each > 0 {
        ledger.add("text", each, "ids, texts and their JSON, scratch of the sampler, a session's buffer".to_owned());
    }
    ledger.add("logits", (rows as u64).saturating_mul(4 * c.vocab_size as u64), format!("{rows} x {}", c.vocab_size));
    ledger
}

/// Adds what the system needs to map all the rest.
fn add_tables(ledger: &mut Ledger) {
    let tables = ledger.total() / (PAGE_TABLES - 1) + 1;
    ledger.add("page tables", tables, format!("one byte for {}", PAGE_TABLES - 1));
}

/// The numbers below `n`, such that the first few of them, however many, lie well apart: in the order of
/// their bits read backwards (van der Corput's sequence).
fn spread(n: usize) -> impl Iterator<Item = usize> {
    let bits = usize::BITS - n.saturating_sub(1).leading_zeros();
    let backwards = move |i: usize| i.reverse_bits().checked_shr(usize::BITS - bits).unwrap_or(0);
    (0..1usize << bits).map(backwards).filter(move |&i| i < n)
}

/// Makes the plan.
///
/// # Errors
/// [`Refusal`] if the budget is below the floor.
pub fn plan(sizes: &Sizes<'_>, request: &Request) -> Result<Plan, Refusal> {
    let c = sizes.config;
    let least = sizes.walk.least_slot();
    let experts = c.num_moe_layers() * c.num_experts;
    let expert = sizes.expert as u64;
    let one_expert = u64::from(experts > 0) * expert;

    // The floor: one sequence, one position at a time or one guess, one slot, one expert.
    let least_chunk = request.speculate + 1;
    let floor_chunk = request.chunk.unwrap_or(1).max(least_chunk);
    let mut floor = fixed(sizes, request, floor_chunk, 1);
    floor.add("trunk ring", least as u64, "1 slot".to_owned());
    floor.add("segments", sizes.walk.list_bytes(least), "lists of what is read together".to_owned());
    floor.add("experts", one_expert, format!("{} slot", u64::from(experts > 0)));
    add_tables(&mut floor);
    // A sum that has saturated is refused whatever the budget is.
    if floor.total() > request.budget || floor.total() == u64::MAX {
        return Err(Refusal { budget: request.budget, floor: floor.total(), ledger: floor });
    }

    let minimum = least as u64 + sizes.walk.list_bytes(least) + one_expert;
    let fits = |chunk: usize, sequences: usize, base: (usize, usize), share: u64| {
        let total = fixed(sizes, request, chunk, sequences).total();
        let more = total.saturating_sub(fixed(sizes, request, base.0, base.1).total());
        let needed = total.saturating_add(minimum).saturating_add(request.budget / PAGE_TABLES + 2);
        more <= share && needed <= request.budget
    };

    // The sequences: half of the budget, for each reads the same weights. Each needs a position of a chunk.
    let many = request.sequences.min(request.chunk.unwrap_or(usize::MAX)).min(MOST_SEQUENCES);
    let sequences =
        (2..=many).rev().find(|&n| fits(floor_chunk.max(n), n, (floor_chunk, 1), request.budget / 2)).unwrap_or(1);

    // The chunk: a sixteenth of the budget, for each trunk byte is read once per chunk.
    let least_chunk = least_chunk.max(sequences);
    let chunk = request.chunk.unwrap_or_else(|| {
        let larger = least_chunk + 1..=request.prompt.min(512);
        let fits = |&n: &usize| fits(n, sequences, (least_chunk, sequences), request.budget / 16);
        larger.rev().find(fits).unwrap_or(least_chunk)
    });
    let chunk = chunk.max(least_chunk);
    let mut ledger = fixed(sizes, request, chunk, sequences);
    let left = request.budget - ledger.total() - minimum;
    // Rounded up twice, here and where they are added.
    let mut left = left.saturating_sub(request.budget / PAGE_TABLES + 2);

    // The ring: at most a quarter of what is left, and a sixteenth if that is more than the usual slots.
    let largest = sizes.walk.largest_layer();
    let target = SLOT_TARGET.min((largest / 2).next_multiple_of(4096)).max(least);
    let ring_bytes = usize::try_from(left / 4).unwrap_or(usize::MAX).saturating_add(least);
    let slot = target.min(ring_bytes / 4 / 4096 * 4096).max(least);
    let more = usize::try_from(left / 16).unwrap_or(usize::MAX) / slot;
    let ring = (ring_bytes / slot).clamp(1, more.clamp(RING_TARGET, RING_MOST));

    // Bytes to keep and bytes to read, layer by layer: the lists of segments are not kept.
    let sums = |layer: usize| {
        let segments = sizes.walk.cut(layer, slot);
        let bytes: u64 = segments.iter().map(|s| s.bytes as u64).sum();
        (bytes, segments.iter().map(Segment::read_bytes).sum::<u64>())
    };
    let costs: Vec<(u64, u64)> = (0..sizes.walk.len()).map(sums).collect();

    // The least of the experts: a token's choice in one layer, if half of what is left holds it.
    let choice = |left: u64| {
        let extra = left.checked_div(2 * expert).unwrap_or(0).min(c.num_experts_per_token.saturating_sub(1) as u64);
        if experts == 0 { 0 } else { 1 + usize::try_from(extra).unwrap_or(0) }
    };
    let beyond_one = |arena: usize| (arena as u64).saturating_sub(1) * expert;

    // Without a ring, if what it would take pins the rest.
    let without = left.saturating_add(least as u64);
    let all = costs.iter().fold(0u64, |sum, cost| sum.saturating_add(cost.0));
    let ring = if all <= without.saturating_sub(beyond_one(choice(without))) { 0 } else { ring };
    let note = match ring {
        0 => "all of the trunk is pinned".to_owned(),
        _ => format!("{ring} slots of {}", human(slot as u64)),
    };
    ledger.add("trunk ring", (ring * slot) as u64, note);
    left = without.saturating_sub((ring * slot) as u64);
    // Larger slots make shorter lists; the difference is not spent again.
    ledger.add("segments", sizes.walk.list_bytes(slot), "lists of what is read together".to_owned());
    let mut arena = choice(left);
    left -= beyond_one(arena);

    // Pinned layers, and the head when all of them are.
    let (mut keeps, mut pinned_bytes) = (vec![false; costs.len()], 0u64);
    let head = costs.len().saturating_sub(1);
    for layer in spread(head).chain([head]) {
        let cost = costs.get(layer).map_or(u64::MAX, |c| c.0);
        // Of a layer that does not fit the place is left to smaller ones; of the head nobody waits for it.
        let turn = layer < head || keeps[..head].iter().all(|&keeps| keeps);
        if turn && cost <= left {
            left -= cost;
            pinned_bytes += cost;
            keeps[layer] = true;
        }
    }
    let trunk_read = costs.iter().zip(&keeps).filter(|(_, keeps)| !**keeps).map(|(c, _)| c.1).sum();
    let layers = keeps[..head].iter().filter(|&&keeps| keeps).count();
    let lm_head = if keeps.last() == Some(&true) { " and lm_head" } else { "" };
    let note = format!("{layers} of {} layers{lm_head}", c.num_hidden_layers);
    ledger.add("pinned trunk", pinned_bytes, note);

    let more = left.checked_div(expert).unwrap_or(0);
    arena = arena.saturating_add(usize::try_from(more).unwrap_or(usize::MAX)).min(experts);
    ledger.add("experts", arena as u64 * expert, format!("{arena} of {experts}, {} each", human(expert)));
    add_tables(&mut ledger);
    let extent = Extent { chunk, context: request.context, width: request.threads };
    let logit_rows = logit_rows(request, chunk, sequences);
    let (budget, readers) = (request.budget, request.readers);
    let missing = if arena == experts { 0 } else { c.num_moe_layers() * c.num_experts_per_token };
    let experts_read = missing as u64 * expert;
    Ok(Plan {
        budget,
        extent,
        readers,
        logit_rows,
        speculate: request.speculate,
        sequences,
        slot,
        ring,
        keeps,
        arena,
        policy: request.policy,
        trunk_read,
        experts_read,
        mapped_later: pinned_bytes.saturating_add((arena as u64).saturating_mul(expert)),
        ledger,
    })
}

#[cfg(test)]
mod tests {
    use super::spread;

    #[test]
    fn pinned_layers_lie_apart_however_many_they_are() {
        for n in [0, 1, 2, 3, 6, 13, 64, 93] {
            let order: Vec<_> = spread(n).collect();
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..n), "{n}: {order:?}");
            for count in 0..=n / 2 {
                let chosen = &order[..count];
                assert!(chosen.iter().all(|i| !chosen.contains(&(i + 1))), "{count} of {n}: {chosen:?}");
            }
            // Beyond half, what is read lies apart.
            for count in n.div_ceil(2)..=n {
                let read = &order[count..];
                assert!(read.iter().all(|i| !read.contains(&(i + 1))), "{count} of {n}: {read:?}");
            }
        }
    }
}
