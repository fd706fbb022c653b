//! A table that somebody edits, elements that the kernel refuses, tables that become others.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use coracle::proxy::apply::{Keeper, Reach};
use coracle::proxy::observe;
use coracle::proxy::table::acts::plan;
use coracle::proxy::table::changes::between;
use coracle::proxy::table::ir::*;
use coracle::proxy::table::read_back::Wrong;
use coracle::sys::{netns, nftables};

use crate::nft::{Nft, able};
use crate::print::sorted;
use crate::sample;

fn assert_whole(table: &Table, when: &str) {
    let mut socket = nftables::open().unwrap();
    let look = observe::look(&mut socket, table).unwrap();
    assert_eq!(look.wrong, BTreeMap::<Name, Wrong>::new(), "{when}");
    let structure = look.structure.unwrap();
    assert_eq!((&structure.sets, &structure.chains), (&table.sets, &table.chains), "{when}");
}

#[test]
fn a_table_is_read_back_as_it_was_written_and_a_second_pass_does_nothing() {
    if !able() {
        return;
    }
    netns::throw_away(|| {
        for family in [Family::Ip, Family::Ip6] {
            let table = sample::table(family);
            let mut keeper = Keeper::new().unwrap();
            let now = Instant::now();
            assert!(!keeper.bring(table.clone(), Reach::All, now).unwrap().was_there);
            assert_whole(&table, "first");
            let generation = nftables::generation(&mut nftables::open().unwrap()).unwrap();
            assert_eq!(keeper.bring(table.clone(), Reach::All, now).unwrap().acts, 0);
            // Another agent finds it and changes nothing.
            let done = Keeper::new().unwrap().bring(table.clone(), Reach::All, now).unwrap();
            assert_eq!((done.acts, done.was_there), (0, true));
            assert_eq!(nftables::generation(&mut nftables::open().unwrap()).unwrap(), generation);
        }
    })
    .unwrap();
}

#[test]
fn whatever_somebody_did_to_the_table_is_seen_and_undone() {
    if !able() {
        return;
    }
    let nft = Nft::host();
    netns::throw_away(|| {
        let table = sample::table(Family::Ip);
        let mut keeper = Keeper::new().unwrap();
        keeper.bring(table.clone(), Reach::All, Instant::now()).unwrap();
        nft.must(&["add", "table", "ip", "foreign"]);
        let shown = || sorted(&nft.must(&["list", "table", "ip", sample::NAME]));
        let whole = shown();
        for damage in [
            "flush ruleset",
            "delete table ip prx",
            "flush table ip prx",
            "flush chain ip prx forward",
            "add rule ip prx forward drop",
            "insert rule ip prx input drop",
            "add chain ip prx mine { type filter hook forward priority 5 ; policy drop ; }",
            "add chain ip prx mine",
            "chain ip prx forward { policy drop ; }",
            "flush map ip prx svc",
            "flush set ip prx cidrs",
            "add element ip prx hairpin { 10.9.9.9 . 10.9.9.9 }",
            "delete element ip prx svc { 10.1.0.1 . tcp . 80 }",
            "delete element ip prx cidrs { 10.1.0.64-10.1.0.127 }",
            "add element ip prx cidrs { 10.99.0.0/16 }",
            "delete element ip prx svc { 10.1.0.3 . tcp . 80 } ; add element ip prx svc { 10.1.0.3 . tcp . 80 : accept }",
            "add element ip prx port-ranges { 1-9 : drop }",
            "add set ip prx mine { type ipv4_addr ; }",
            "delete chain ip prx mangle",
            // What leads to a chain goes along with its new name; comments tell nothing of that.
            "rename chain ip prx services mine",
            "rename chain ip prx lb-1 mine",
            "rename chain ip prx lb-1 mine && rename chain ip prx lb-2 lb-1 && rename chain ip prx mine lb-2",
            "add table ip prx { flags dormant ; }",
            "add table ip prx { flags dormant ; } ; flush chain ip prx forward",
        ] {
            damage.split(" && ").for_each(|command| drop(nft.must(&[command])));
            let done = keeper.bring(table.clone(), Reach::All, Instant::now()).unwrap();
            assert!(done.acts > 0, "{damage}: {done:?}");
            assert_whole(&table, damage);
            assert_eq!(shown(), whole, "{damage}");
        }
        nft.must(&["add", "table", "ip", "foreign"]);
        // A set of that name and of another kind, in use by our own rules.
        nft.must(&["flush chain ip prx postrouting ; delete set ip prx hairpin ; add set ip prx hairpin { type ipv4_addr ; }"]);
        // Nobody tells us: what we think is there is not.
        let mut more = table.clone();
        more.elements
            .get_mut("hairpin")
            .unwrap()
            .insert(Key::of(&[Value::Address(sample::address(Family::Ip, 9)); 2]), Element::bare());
        assert_eq!(keeper.change(&between(&table, &more)), None);
        keeper.bring(more.clone(), Reach::All, Instant::now()).unwrap();
        assert_whole(&more, "another kind of set");
        assert!(nft.must(&["list", "tables"]).contains("table ip foreign"));
    })
    .unwrap();
}

#[test]
fn an_element_that_the_kernel_refuses_is_named_and_keeps_no_other_out() {
    if !able() {
        return;
    }
    netns::throw_away(|| {
        let good = sample::table(Family::Ip);
        let mut keeper = Keeper::new().unwrap();
        let start = Instant::now();
        keeper.bring(good.clone(), Reach::All, start).unwrap();
        let mut table = good.clone();
        let services = table.elements.get_mut("svc").unwrap();
        for n in 100..3000 {
            services.insert(sample::service(Family::Ip, n), Element::verdict(Verdict::Goto("lb-1".into())));
        }
        let whose: std::sync::Arc<str> = "shop/broken".into();
        for n in [777, 2999] {
            let broken = Element::verdict(Verdict::Goto("no-such-chain".into())).with(&whose);
            services.insert(sample::service(Family::Ip, n), broken);
        }
        let lone = |n| vec![Value::Address(sample::address(Family::Ip, n))];
        // Overlaps 16-31: the kernel cannot have both.
        table.elements.get_mut("cidrs").unwrap().insert(Key::range(&lone(20), &lone(40)), Element::bare());
        keeper.bring(table.clone(), Reach::All, start).unwrap();
        let refused: Vec<String> = keeper.refused().collect();
        assert_eq!(refused.len(), 3, "{refused:?}");
        assert_eq!(
            refused.iter().filter(|r| r.contains("of set svc (shop/broken): the kernel refuses it: No such file")).count(),
            2
        );
        assert_eq!(refused.iter().filter(|r| r.contains("of set cidrs")).count(), 1, "{refused:?}");
        let mut without = table.clone();
        let services = without.elements.get_mut("svc").unwrap();
        services.remove(&sample::service(Family::Ip, 777));
        services.remove(&sample::service(Family::Ip, 2999));
        without.elements.insert("cidrs".into(), good.elements["cidrs"].clone());
        assert_whole(&without, "without the refused ones");

        // Before its time nothing is tried; then it is, and waits twice as long.
        assert_eq!(keeper.bring(table.clone(), Reach::All, start).unwrap().acts, 0);
        let first = keeper.next().unwrap();
        assert_eq!(first - start, Duration::from_secs(1));
        keeper.bring(table.clone(), Reach::All, first).unwrap();
        assert_eq!(keeper.next().unwrap() - first, Duration::from_secs(2));
        assert_eq!(keeper.refused().count(), 3);
        // What was wrong with it is mended: it goes in.
        table.chains.insert("no-such-chain".into(), Chain::default());
        table.elements.get_mut("cidrs").unwrap().remove(&Key::range(&lone(20), &lone(40)));
        let again = keeper.next().unwrap();
        keeper.bring(table.clone(), Reach::All, again).unwrap();
        assert_eq!(keeper.refused().count(), 0);
        assert_whole(&table, "mended");
    })
    .unwrap();
}

/// Variants of the sample that differ in everything that can differ.
fn variant(family: Family, n: u32) -> Table {
    let mut table = sample::table(family);
    let bit = |at: u32| n >> at & 1 == 1;
    if bit(0) {
        table.elements.remove("svc");
    }
    if bit(1) {
        table.chains.get_mut("forward").unwrap().rules.truncate(3);
    }
    if bit(2) {
        table.sets.insert("known".into(), SetSpec::set(&[Type::Address]).of_ranges());
        let ip = [Value::Address(sample::address(family, 8))];
        table.elements.insert("known".into(), [(Key::range(&ip, &ip), Element::bare())].into());
    }
    if bit(3) {
        let svc = table.elements.entry("svc".into()).or_default();
        svc.insert(sample::service(family, 3), Element::verdict(Verdict::Goto("lb-2".into())));
        svc.remove(&sample::service(family, 1));
    }
    if bit(4) {
        table.chains.remove("mangle");
        table.chains.insert("raw".into(), Chain { base: None, rules: Vec::new() });
    }
    if bit(5) {
        let base = table.chains.get_mut("input").unwrap().base.as_mut().unwrap();
        base.priority = 10;
    }
    if bit(6) {
        // lb-2 goes with all that leads to it.
        table.chains.remove("lb-2");
        if let Some(svc) = table.elements.get_mut("svc") {
            svc.retain(|_, e| e.data != Data::Verdict(Verdict::Goto("lb-2".into())));
        }
    }
    if bit(7) {
        table.elements.get_mut("fw").unwrap().clear();
        table.elements.retain(|_, e| !e.is_empty());
    }
    table
}

#[test]
fn a_table_becomes_any_other_one_in_one_transaction() {
    if !able() {
        return;
    }
    netns::throw_away(|| {
        for family in [Family::Ip, Family::Ip6] {
            let (mut whole, mut changing) = (Keeper::new().unwrap(), Keeper::new().unwrap());
            let mut before = variant(family, 0);
            whole.bring(before.clone(), Reach::All, Instant::now()).unwrap();
            let mut socket = nftables::open().unwrap();
            for step in 0..60u32 {
                let after = variant(family, step.wrapping_mul(2_654_435_761) >> 24);
                let acts = plan(Some(&before), &after);
                let transactions = u32::from(!acts.main.is_empty()) + acts.sweep.len() as u32;
                let generation = nftables::generation(&mut socket).unwrap();
                let done = whole.bring(after.clone(), Reach::All, Instant::now()).unwrap();
                assert_eq!(done.acts, acts.main.len() + acts.sweep.len(), "{step}");
                assert_eq!(nftables::generation(&mut socket).unwrap(), generation + transactions, "{step}");
                assert_whole(&after, "whole");
                // The same by changes that somebody made of what he knows.
                changing.bring(before.clone(), Reach::All, Instant::now()).unwrap();
                assert!(changing.change(&between(&before, &after)).is_some(), "{step}");
                assert_eq!(changing.held(), Some(&after.clone_structure()));
                assert_whole(&after, "changes");
                before = after;
            }
        }
    })
    .unwrap();
}
