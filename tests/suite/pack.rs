//! Packed trunks: what they hold, and that no damaged one is read.

use crate::run::{How, open, packed, run, run_from};
use k3_core::view::TokenId;
use k3_platform::error::Error;
use k3_platform::io::{Disk, Mode, ReadFault, Source};
use k3_platform::pack::{Different, Pack, PackFault, SegmentRecord, compare, nominal_sizes, verify};
use k3_tests::{checkpoints, root};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

fn pack(path: &Path) -> Result<Pack, Error> {
    Pack::open(path, &Disk::new(Mode::Buffered))
}

fn damaged(pack: &Pack) -> Result<Vec<Different>, Error> {
    let disk: Arc<dyn Source> = Arc::new(Disk::new(Mode::Buffered));
    verify(pack, pack.files(&disk), &Arc::default(), &mut |_| ())
}

#[test]
fn a_pack_holds_the_weights_of_its_model() {
    for dir in checkpoints() {
        let checkpoint = open(&dir, Mode::Buffered).expect("open");
        for coded in [false, true] {
            let pack = pack(&packed(&dir, coded)).expect("a pack");
            pack.matches(&checkpoint).expect("of this model");
            assert_eq!(compare(&pack, &checkpoint, &Arc::default(), &mut |_| ()).expect("read"), []);
            let pieces = pack.tensors().iter().flat_map(|t| pack.pieces(t).iter().map(move |p| (t.tensor, p)));
            let coded_ones = pieces.filter(|(t, p)| p.coded && t.may_be_coded()).count();
            assert_eq!(coded_ones > 0, coded);
            // What `k3 plan` says before there is a pack: exact but for misfits.
            let nominal = nominal_sizes(&checkpoint, coded);
            let embed = pack.groups()[0].segments;
            let sum = |segments: &[SegmentRecord]| segments.iter().map(|s| u64::from(s.len)).sum::<u64>();
            let (file, read) = (sum(pack.segments()), sum(&pack.segments()[embed..]));
            assert!(nominal.file <= file && nominal.read <= read, "{nominal:?} {file} {read}");
            assert!(coded || (nominal.file, nominal.read) == (file, read), "{nominal:?} {file} {read}");
        }
    }
}

/// One bit anywhere: in the header, in any part of any segment with its padding, in the table.
#[test]
fn no_flipped_bit_goes_unseen() {
    let dir = root().join("fixtures/tiny");
    let whole = std::fs::read(packed(&dir, true)).expect("read");
    let segments = pack(&packed(&dir, true)).expect("a pack").segments().to_vec();
    let tmp = tempfile::tempdir().expect("tmp");
    let path = tmp.path().join("bad.k3");
    std::fs::write(&path, &whole).expect("write");
    let file = std::fs::OpenOptions::new().write(true).open(&path).expect("open");
    // Ends and middles of segments, and a walk over everything.
    let mut places: Vec<usize> = (0..whole.len()).step_by(whole.len() / 50).chain([8, 100, 2000, 4095]).collect();
    for s in &segments {
        let (start, len) = (usize::try_from(s.offset).expect("small"), s.len as usize);
        places.extend([start, start + 16, start + len / 2, start + len - 1]);
    }
    places.push(whole.len() - 1);
    for at in places {
        file.write_all_at(&[whole[at] ^ 4], at as u64).expect("write");
        match pack(&path) {
            Err(Error::Pack(_)) => {}
            Err(error) => panic!("byte {at}: {error}"),
            Ok(pack) => {
                let different = damaged(&pack).expect("read");
                let number = segments.partition_point(|s| s.offset <= at as u64) - 1;
                assert_eq!(different.iter().map(|d| d.segment).collect::<Vec<_>>(), [number], "byte {at}");
            }
        }
        file.write_all_at(&[whole[at]], at as u64).expect("write");
    }
    for len in [0, 1, 4095, 4096, 4097, whole.len() / 2, whole.len() - 1] {
        file.set_len(len as u64).expect("cut");
        assert!(matches!(pack(&path), Err(Error::Pack(_))), "{len} bytes");
        file.write_all_at(&whole, 0).expect("write");
    }
    file.set_len(whole.len() as u64 + 1).expect("grow");
    let longer = pack(&path).expect_err("a longer file");
    assert!(matches!(&longer, Error::Pack(e) if matches!(e.fault, PackFault::Length { .. })), "{longer}");
}

/// Whatever a budget keeps or streams, what the disk has changed is not computed with.
#[test]
fn a_run_stops_at_a_damaged_segment_and_names_it() {
    let dir = root().join("fixtures/tiny");
    let good = pack(&packed(&dir, true)).expect("a pack");
    let prompt = [TokenId(1), TokenId(2), TokenId(3)];
    let tmp = tempfile::tempdir().expect("tmp");
    let path = tmp.path().join("bad.k3");
    for (number, segment) in good.segments().iter().enumerate() {
        // Most segments of the embedding have none of the rows.
        if number > 0 && number < good.groups()[0].segments {
            continue;
        }
        std::fs::copy(good.path(), &path).expect("copy");
        let file = std::fs::OpenOptions::new().read(true).write(true).open(&path).expect("open");
        let mut byte = [0];
        file.read_exact_at(&mut byte, segment.offset + 100).expect("read");
        file.write_all_at(&[byte[0] ^ 0x80], segment.offset + 100).expect("write");
        for budget in [64 << 20, 1 << 30] {
            let how = How { budget, ..How::default() };
            let mut checkpoint = open(&dir, Mode::Buffered).expect("open");
            checkpoint.use_pack(&path).expect("header and table are whole");
            let mut engine = crate::run::engine(checkpoint, &how, 3, 4).expect("an engine");
            let mut logits = vec![0.0; engine.checkpoint().config().vocab_size];
            let error = engine.step(&prompt, &mut logits, &mut ()).expect_err("damaged");
            let Error::Read(read) = &error else { panic!("segment {number}: {error}") };
            assert!(matches!(read.fault, ReadFault::Checksum { segment } if segment == number), "{number}: {error}");
            assert_eq!(read.path, path);
        }
    }
}

/// A slower disk gives the same tokens, later.
#[test]
fn a_throttled_disk_changes_nothing() {
    let dir = root().join("fixtures/tiny");
    let prompt = [TokenId(1), TokenId(2), TokenId(3)];
    let how = How { pack: Some(true), budget: 64 << 20, ..How::default() };
    let expected = run(&dir, &how, &prompt, 3).expect("a run");
    let slow = k3_platform::io::Throttled::new(Arc::new(Disk::new(Mode::Direct)), 2e8);
    let found = run_from(Arc::new(slow), &dir, &how, &prompt, 3).expect("a run");
    assert_eq!(found.generated, expected.generated);
    assert!(found.logits.iter().zip(&expected.logits).all(|(a, b)| a.to_bits() == b.to_bits()));
}

/// The short form of the identity table: the same bits without a pack and from either form of it.
#[test]
fn a_pack_changes_no_bit() {
    let dir = root().join("fixtures/tiny");
    let prompt = [TokenId(1), TokenId(9), TokenId(3), TokenId(9)];
    let expected = run(&dir, &How::default(), &prompt, 3).expect("a run");
    for pack in [Some(false), Some(true)] {
        for (budget, chunk) in [(19_000_000, Some(1)), (24_000_000, Some(3)), (1 << 30, None)] {
            let found = run(&dir, &How { pack, budget, chunk, ..How::default() }, &prompt, 3).expect("a run");
            assert_eq!(found.generated, expected.generated, "{pack:?} {budget}");
            let same = found.logits.iter().zip(&expected.logits).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same && found.logits.len() == expected.logits.len(), "{pack:?} {budget}");
        }
    }
}
