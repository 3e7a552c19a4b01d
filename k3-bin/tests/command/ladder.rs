//! One prompt at several budgets.

use super::limits::{filled, floor};
use super::{code, k3, send, text, tiny};
use rustix::process::{Pid, Signal, kill_process};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Rows by column name.
fn rows(table: &str) -> Vec<Vec<(String, String)>> {
    let mut lines = table.lines().map(|line| line.split('\t').map(str::to_owned).collect::<Vec<_>>());
    let header = lines.next().expect("a header");
    lines
        .map(|cells| {
            assert_eq!(cells.len(), header.len());
            header.iter().cloned().zip(cells).collect()
        })
        .collect()
}

fn cell<'r>(row: &'r [(String, String)], name: &str) -> &'r str {
    &row.iter().find(|(column, _)| column == name).unwrap_or_else(|| panic!("no {name}")).1
}

#[test]
fn every_budget_is_a_row_and_the_ids_are_the_same() {
    let folder = tempfile::tempdir().expect("a folder");
    let (model, out, svg) = (folder.path().join("m"), folder.path().join("t.tsv"), folder.path().join("t.svg"));
    filled(&model);
    let refused = k3().args(["run", "--ids", "1,2", "--max-tokens", "2", "--memory", "1M"]).arg(&model).output();
    let least = floor(&refused.expect("k3"));
    let budgets = [1_000_000, least - 1, least, least + 9_000_000, 200_000_000].map(|b| b.to_string()).join(",");
    let output = k3()
        .args(["ladder", "--ids", "1,2", "--max-tokens", "2", "--budgets", &budgets, "--out"])
        .arg(&out)
        .arg("--svg")
        .args([&svg, &model])
        .output()
        .expect("k3");
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
    let table = text(&output.stdout);
    assert_eq!(std::fs::read_to_string(&out).expect("the table"), table);
    let rows = rows(&table);
    let column = |name: &str| rows.iter().map(|row| cell(row, name)).collect::<Vec<_>>();
    assert_eq!(column("status"), ["refused", "refused", "ok", "ok", "ok"]);
    assert_eq!(column("same_ids"), ["-", "-", "yes", "yes", "yes"]);
    assert!(column("floor_bytes").iter().all(|f| *f == least.to_string()));
    assert_eq!(column("peak_rss_bytes")[..2], ["-", "-"]);
    let pinned = column("pinned_layers");
    assert_eq!((pinned[2], pinned[4]), ("0/9", "9/9"));
    assert_eq!((column("trunk_hit_rate")[2], column("trunk_hit_rate")[4]), ("0.0000", "1.0000"));
    assert_eq!(column("head_pinned")[4], "yes");
    for row in &rows[2..] {
        let number = |name: &str| cell(row, name).parse::<f64>().unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(number("peak_rss_bytes") <= number("budget_bytes"), "{row:?}");
        assert!(number("seconds_per_token") > 0.0 && number("expert_hit_rate") >= 0.0);
    }
    let read = |i: usize| column("gb_per_token")[i].parse::<f64>().expect("GB");
    assert!(read(2) > read(3) && read(3) > read(4), "{table}");
    let svg = std::fs::read_to_string(svg).expect("the picture");
    assert!(svg.contains("seconds per token") && svg.contains("expert hit rate"));
    let progress = text(&output.stderr);
    assert!(progress.contains("rung 3 of 5") && progress.contains("the least that can hold"), "{progress}");
    assert_eq!(std::fs::read_dir(folder.path()).expect("folder").count(), 3);
}

#[test]
fn budgets_are_found_and_a_text_reaches_every_run() {
    let output = k3()
        .args(["ladder", "--json", "--quiet", "--prompt-file", "-", "--max-tokens", "2", "--memory", "64M"])
        .arg(tiny())
        .stdin({
            let (read, mut write) = std::io::pipe().expect("a pipe");
            std::io::Write::write_all(&mut write, b"In the beginning").expect("write");
            read
        })
        .output()
        .expect("k3");
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
    let object: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let rungs = object["rungs"].as_array().expect("rungs");
    assert!(rungs.len() >= 2, "{object}");
    assert_eq!(rungs[0]["budget_bytes"], object["floor_bytes"]);
    assert!(rungs.iter().all(|r| r["status"] == "ok" && r["same_ids"] == true), "{object}");
    // The last one has everything in memory.
    let last = rungs.last().expect("a rung");
    assert_eq!(last["pinned_layers"], object["layers"]);
    assert_eq!(last["head_pinned"], true);
    assert_eq!(last["arena_experts"], 8 * 11);
    let mut run = k3();
    run.args(["run", "--json", "--ignore-eos", "--max-tokens", "2", "--prompt", "In the beginning"]).arg(tiny());
    let run: serde_json::Value = serde_json::from_slice(&run.output().expect("k3").stdout).expect("JSON");
    assert_eq!(run["generated_ids"], last["generated_ids"]);
    // None of them can be held.
    let output = k3().args(["ladder", "--quiet", "--budgets", "1M,2M"]).arg(tiny()).output().expect("k3");
    assert_eq!(code(&output), 4);
    assert_eq!(rows(&text(&output.stdout)).len(), 2);
}

/// Processes that are rungs of this ladder.
fn rungs_of(ladder: u32) -> Vec<PathBuf> {
    let wanted = format!("--rung-of\0{ladder}\0");
    let processes = std::fs::read_dir("/proc").expect("/proc").flatten().map(|e| e.path());
    let line = |p: &Path| std::fs::read(p.join("cmdline")).map(|b| text(&b)).unwrap_or_default();
    processes.filter(|p| line(p).contains(&wanted)).collect()
}

fn until(what: &str, condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A ladder whose only rung does not end by itself.
fn endless(out: &Path) -> Child {
    let mut command = k3();
    command.args(["ladder", "--quiet", "--budgets", "96M,97M", "--max-tokens", "90000", "--out"]).arg(out);
    command.arg(tiny()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("k3")
}

#[test]
fn the_run_ends_with_its_ladder_however_that_ends() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("t.tsv");
    for (signal, expected) in [(Signal::INT, Some(130)), (Signal::TERM, Some(143)), (Signal::KILL, None)] {
        let child = endless(&out);
        let id = child.id();
        until("a rung", || !rungs_of(id).is_empty());
        send(&child, signal);
        let output = child.wait_with_output().expect("k3");
        assert_eq!(output.status.code(), expected, "{signal:?}: {}", text(&output.stderr));
        until("the rung ends", || rungs_of(id).is_empty());
        if expected.is_some() {
            let table = std::fs::read_to_string(&out).expect("the table");
            assert_eq!(table, text(&output.stdout));
            let rows = rows(&table);
            assert_eq!((rows.len(), cell(&rows[0], "status")), (1, "cancelled"), "{table}");
            std::fs::remove_file(&out).expect("remove");
        }
        assert_eq!(std::fs::read_dir(folder.path()).expect("folder").count(), 0, "{signal:?}");
    }
}

/// As the system kills what takes too much.
#[test]
fn a_run_that_is_killed_is_a_row() {
    let folder = tempfile::tempdir().expect("a folder");
    let child = endless(&folder.path().join("t.tsv"));
    let id = child.id();
    let mut killed = Vec::new();
    while killed.len() < 2 {
        until("a rung", || rungs_of(id).iter().any(|p| !killed.contains(p)));
        for rung in rungs_of(id) {
            let number = rung.file_name().and_then(|name| name.to_str()?.parse().ok());
            kill_process(number.and_then(Pid::from_raw).expect("a number"), Signal::KILL).expect("kill");
            killed.push(rung.clone());
            until("its end", || !rungs_of(id).contains(&rung));
        }
    }
    let output = child.wait_with_output().expect("k3");
    assert_eq!(code(&output), 5, "{}", text(&output.stderr));
    let rows = rows(&text(&output.stdout));
    assert!(rows.len() == 2 && rows.iter().all(|row| cell(row, "status") == "failed"), "{rows:?}");
}
