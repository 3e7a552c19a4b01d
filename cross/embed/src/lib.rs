//! `k3-core` for programs that are not Rust: two functions with a C interface, and memory that the
//! caller owns. `include/k3_embed.h` is their documentation.
//!
//! There is no std here, no allocator and no system call; `shell.rs` is all that an embedding has to
//! bring. `run.sh` builds it as a static library for C and as a module for wasm, and compares what both
//! print with what `k3 run` does.
#![no_std]

mod shell;

use k3_core::backend::Backend;
use k3_core::carve::{BufferError, Carver, Line};
use k3_core::checkpoint::slot_count;
use k3_core::config::{ConfigError, ModelConfig};
use k3_core::math::canonical_bits;
use k3_core::model::{Extent, ForwardError, Model, State, Workspace};
use k3_core::ops::sample::{NonFiniteLogit, argmax};
use k3_core::safetensors::HeaderError;
use k3_core::tokenizer::{self, EncodeError, Specials, Vocab, VocabError};
use k3_core::view::TokenId;
use shell::{Archive, Checkpoint, InOrder};

/// A bug of the core would end here; there is nobody to tell, so the machine stops.
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    #[cfg(target_arch = "wasm32")]
    core::arch::wasm32::unreachable();
    #[cfg(not(target_arch = "wasm32"))]
    loop {
        core::hint::spin_loop();
    }
}

/// Why nothing was generated: the header's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Fault {
    /// `K3_ARCHIVE`
    Archive = 1,
    /// `K3_CONFIG`
    Config = 2,
    /// `K3_TENSOR`
    Tensor = 3,
    /// `K3_VOCABULARY`
    Vocabulary = 4,
    /// `K3_MEMORY`
    Memory = 5,
    /// `K3_ROOM`
    Room = 6,
    /// `K3_ARITHMETIC`
    Arithmetic = 7,
    /// `K3_ARGUMENT`
    Argument = 8,
}

/// Each of the core's errors is one of the header's numbers.
macro_rules! faults {
    ($($error:ty => $fault:ident),*) => {
        $(impl From<$error> for Fault {
            fn from(_: $error) -> Self {
                Self::$fault
            }
        })*
    };
}

faults!(BufferError => Memory, ConfigError => Config, HeaderError => Tensor, VocabError => Vocabulary,
    EncodeError => Memory, NonFiniteLogit => Arithmetic);

impl From<ForwardError<Self>> for Fault {
    fn from(error: ForwardError<Self>) -> Self {
        match error {
            ForwardError::Weights(fault) => fault,
            ForwardError::NonFinite { .. } => Self::Arithmetic,
            _ => Self::Argument,
        }
    }
}

/// Positions that are computed at once. The result does not depend on it.
const CHUNK: usize = 8;

const fn extent(context: usize) -> Extent {
    Extent { chunk: CHUNK, context, width: 1 }
}

/// Lines of memory for [`generate`], in the order in which it takes them.
fn lines(archive: Archive<'_>, context: usize, prompt: usize) -> Result<usize, Fault> {
    let config = ModelConfig::parse(archive.file("config.json")?)?;
    let parts = [
        Line::of::<[u32; 2]>(slot_count(&config)),
        Some(Vocab::required(archive.file("tiktoken.model")?)?),
        tokenizer::scratch_len(prompt),
        Line::of::<f32>(config.vocab_size),
        State::lines(&config, context),
        Workspace::lines(&config, extent(context)),
    ];
    parts.into_iter().try_fold(0_usize, |sum, part| sum.checked_add(part?)).ok_or(Fault::Memory)
}

/// What [`generate`] has done.
struct Done {
    prompt: usize,
    total: usize,
    bits: u64,
}

/// Writes the prompt's ids and then the model's greedy ones to `ids`, until it is full or a text ends.
fn generate(archive: Archive<'_>, memory: &mut [Line], prompt: &[u8], ids: &mut [u32]) -> Result<Done, Fault> {
    let config = ModelConfig::parse(archive.file("config.json")?)?;
    let context = ids.len();
    let mut carver = Carver::new(memory);
    let mut weights = Checkpoint::open(archive, &config, &mut carver)?;
    let vocab = archive.file("tiktoken.model")?;
    let vocab = Vocab::load(vocab, carver.take(Vocab::required(vocab)?)?)?;
    let specials = Specials::new(vocab.len(), &mut []);
    if specials.end() as usize != config.vocab_size {
        return Err(Fault::Vocabulary);
    }
    let scratch = carver.take(tokenizer::scratch_len(prompt.len()).ok_or(Fault::Memory)?)?;
    let logits = carver.take::<f32>(config.vocab_size)?;
    let state = carver.take(State::lines(&config, context).ok_or(Fault::Memory)?)?;
    let mut state = State::new(state, &config, context)?;
    let workspace = carver.take(Workspace::lines(&config, extent(context)).ok_or(Fault::Memory)?)?;
    let mut workspace = Workspace::new(workspace, &config, extent(context))?;

    // What does not fit is counted too, so that the caller hears of it.
    let mut count = 0_usize;
    tokenizer::encode(&vocab, prompt, scratch, |id| {
        if let Some(place) = ids.get_mut(count) {
            *place = id.0;
        }
        count += 1;
    })?;
    if count == 0 {
        return Err(Fault::Argument);
    }
    if count > context {
        return Err(Fault::Room);
    }

    let model = Model { config: &config, backend: Backend::detect(), exec: &InOrder };
    let mut done = Done { prompt: count, total: count, bits: 0xcbf2_9ce4_8422_2325 };
    let mut seen = 0;
    while done.total < context {
        // The prompt in chunks, of which the last one is asked for logits; then id by id.
        let mut chunk = [TokenId(0); CHUNK];
        let n = (done.total - seen).min(CHUNK);
        let new = ids.get(seen..).unwrap_or_default();
        chunk.iter_mut().zip(new).take(n).for_each(|(to, from)| *to = TokenId(*from));
        seen += n;
        let wanted = if seen == done.total { config.vocab_size } else { 0 };
        let (chunk, logits) = (chunk.get(..n).unwrap_or_default(), logits.get_mut(..wanted).unwrap_or_default());
        model.forward(&mut weights, &mut state, &mut workspace, chunk, logits, &mut ())?;
        // FNV-1a over the bits of all logits that were looked at, any NaN as one.
        for byte in logits.iter().flat_map(|&logit| canonical_bits(logit).to_le_bytes()) {
            done.bits = (done.bits ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
        if let (Some(best), Some(place)) = (argmax(logits)?, ids.get_mut(done.total)) {
            *place = best.0;
            done.total += 1;
            if specials.is_stop(best) {
                break;
            }
        }
    }
    Ok(done)
}

/// A slice of the caller's; `None` for null, bad alignment or a length beyond the address space.
///
/// # Safety
/// If none of these is the case, `data` points to `len` values that stay as they are for `'a`.
unsafe fn slice<'a, T>(data: *const T, len: usize) -> Option<&'a [T]> {
    let fits = len.checked_mul(size_of::<T>()).is_some_and(|bytes| isize::try_from(bytes).is_ok());
    if data.is_null() || !data.is_aligned() || !fits {
        return None;
    }
    // SAFETY: not null, aligned, not too long; that it is there is the caller's word.
    Some(unsafe { core::slice::from_raw_parts(data, len) })
}

/// As [`slice`], to write.
///
/// # Safety
/// As for [`slice`], and nobody else reads or writes these values for `'a`.
unsafe fn slice_mut<'a, T>(data: *mut T, len: usize) -> Option<&'a mut [T]> {
    // SAFETY: the same contract, checked in the same way; used only to check.
    unsafe { slice(data.cast_const(), len) }?;
    // SAFETY: as in `slice`; that nobody else has it is the caller's word.
    Some(unsafe { core::slice::from_raw_parts_mut(data, len) })
}

/// See the header.
///
/// # Safety
/// The pointers are as the header asks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn k3_memory_needed(
    archive: *const u8,
    archive_len: usize,
    context: usize,
    prompt_len: usize,
    needed: *mut usize,
) -> i32 {
    // SAFETY: the header's contract for each of them.
    let (archive, needed) = unsafe { (slice(archive, archive_len), slice_mut(needed, 1)) };
    let (Some(archive), Some([needed])) = (archive, needed) else { return Fault::Argument as i32 };
    let bytes = lines(Archive(archive), context, prompt_len)
        .and_then(|lines| lines.checked_mul(Line::BYTES).ok_or(Fault::Memory));
    match bytes {
        Ok(bytes) => {
            *needed = bytes;
            0
        }
        Err(fault) => fault as i32,
    }
}

/// See the header.
///
/// # Safety
/// The pointers are as the header asks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn k3_generate(
    archive: *const u8,
    archive_len: usize,
    memory: *mut u8,
    memory_len: usize,
    prompt: *const u8,
    prompt_len: usize,
    ids: *mut u32,
    ids_len: usize,
    counts: *mut usize,
    bits: *mut u64,
) -> i32 {
    if !memory.cast::<Line>().is_aligned() {
        return Fault::Memory as i32;
    }
    // SAFETY: the header's contract for each of them; none overlaps another that is written. A `Line`
    // is any 64 bytes on a 64-byte border.
    let (archive, memory, prompt, ids, counts, bits) = unsafe {
        (
            slice(archive, archive_len),
            slice_mut(memory.cast::<Line>(), memory_len / Line::BYTES),
            slice(prompt, prompt_len),
            slice_mut(ids, ids_len),
            slice_mut(counts, 2),
            slice_mut(bits, 1),
        )
    };
    let (Some(archive), Some(memory), Some(prompt), Some(ids)) = (archive, memory, prompt, ids) else {
        return Fault::Argument as i32;
    };
    let (Some([prompt_count, total]), Some([bits])) = (counts, bits) else { return Fault::Argument as i32 };
    match generate(Archive(archive), memory, prompt, ids) {
        Ok(done) => {
            (*prompt_count, *total, *bits) = (done.prompt, done.total, done.bits);
            0
        }
        Err(fault) => fault as i32,
    }
}
